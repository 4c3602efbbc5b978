"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

from piecegraph.runner.prompts.chat import ChatOptions
from piecegraph.tools.serve.endpoints.service import Service
from piecegraph.tools.serve.protocol.error_replies import bad_request
from piecegraph.tools.serve.protocol.request_models import DetokenizeBody, TokenizeBody


async def tokenize_reply(service: Service, body: TokenizeBody) -> dict[str, Any]:
    """Return the token ids of a text or a conversation, their number, and the model's length."""
    service.check_model(body.model)
    if body.messages is not None:
        options = ChatOptions(
            chat_template=service.check_template(body.chat_template),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs or {},
            tokenization_kwargs=None if not body.add_special_tokens else {"add_special_tokens": True},
        )
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        tokens = (await service.rendered(messages, options, None)).token_ids
    else:
        assert body.prompt is not None, "checked by the body's model"
        found = await service.tokenized(
            body.prompt, add_special_tokens=body.add_special_tokens is not False, cache_salt=None
        )
        tokens = found.token_ids
    reply: dict[str, Any] = {"count": len(tokens), "max_model_len": service.llm.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        tokenizer = service.tokenizer
        reply["token_strs"] = await service.in_tokenizer_thread(lambda: tokenizer.convert_ids_to_tokens(tokens))
    return reply


async def detokenize_reply(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    """Return the text of token ids."""
    service.check_model(body.model)
    vocab_size = service.vocab_size
    for token in body.tokens:
        if not 0 <= token < vocab_size:
            raise bad_request(f"tokens has {token}; ids go from 0 to {vocab_size - 1}.")
    tokenizer = service.tokenizer
    return {"prompt": await service.in_tokenizer_thread(lambda: tokenizer.decode(body.tokens))}
