"""The pooling methods of `LLM`: `embed`, `classify`, `encode` and `score`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from piecegraph.errors import RequestError
from piecegraph.runner.offline.loaded_llm import LoadedLLM
from piecegraph.runner.pooling.params import PoolingParams
from piecegraph.runner.prompts.request_options import refuse_lora
from piecegraph.runner.prompts.tokenize import Prompts

if TYPE_CHECKING:
    from piecegraph.runner.pooling.engine import PooledOutput
    from piecegraph.runner.pooling.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        ScoringRequestOutput,
    )


class PoolingLLM(LoadedLLM):
    """The methods that turn texts into vectors, classes or scores."""

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return an output for each prompt, in their order, with its embedding as `outputs.embedding`.

        Raises `UsageError` unless the `LLM` was made for pooling, and `RequestError`, before any prompt runs, if one of
        the prompts or parameters is refused.
        """
        from piecegraph.runner.pooling.requests import embed

        refuse_lora(lora_request)
        return embed(self._pooler, prompts, pooling_params, use_tqdm, tokenization_kwargs)

    def classify(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return an output for each prompt, in their order, with the probabilities of its classes as `outputs.probs`.

        The `LLM` must have been made for pooling, with a model for sequence classification. Raises the same errors as
        `embed`.
        """
        from piecegraph.runner.pooling.requests import classify

        refuse_lora(lora_request)
        return classify(self._pooler, prompts, pooling_params, use_tqdm, tokenization_kwargs)

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: object = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PooledOutput]:
        """Return the results of `embed` or `classify` as tensors, `outputs.data`.

        `pooling_task`: "embed" or "classify"; any other task than the one that the model was loaded for is refused.
        None: that task. "token_embed", of a model that embeds: an embedding of each token, `[num_tokens, size]`.
        """
        from piecegraph.runner.pooling.requests import checked_task, encode

        refuse_lora(lora_request)
        of_tokens = checked_task(self._pooler, pooling_task)
        return encode(self._pooler, prompts, pooling_params, use_tqdm, tokenization_kwargs, of_tokens=of_tokens)

    def score(
        self,
        data_1: Prompts,
        data_2: Prompts,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each text of `data_1` matches that of `data_2`, `outputs.score`.

        A single text in `data_1` is compared with every text of `data_2`. A classifier with one label (a cross-encoder)
        reads both texts together; with any other model, the score is the cosine similarity of the two embeddings.
        Raises the same errors as `embed`.
        """
        from piecegraph.runner.pooling.requests import score

        refuse_lora(lora_request)
        if chat_template is not None:
            raise RequestError("score takes no chat_template: pairs are joined by the tokenizer. Leave it out.")
        return score(self._pooler, data_1, data_2, pooling_params, use_tqdm, tokenization_kwargs)
