"""The kind of model that a config stands for: one that generates, or one of those that pool."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from piecegraph.errors import UnsupportedModel
from piecegraph.runner.attention.interface.transformers_attention import ATTENTION_IMPLEMENTATION

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """A class that transformers loads a model as, and what the runner needs to know of it."""

    auto_class: str = "AutoModelForCausalLM"
    mapping: str = "MODEL_FOR_CAUSAL_LM_MAPPING"  # from configs to the classes behind `auto_class`
    name: str = "causal language model"
    attention: str = ATTENTION_IMPLEMENTATION
    inputs: tuple[str, ...] = ("position_ids", "logits_to_keep")  # of its forward
    options: Mapping[str, Any] = field(default_factory=dict)  # for the constructor, where it takes them
    ignores_other_weights: bool = False  # weights that the class does not have, such as a head, are not read

    @property
    def generates(self) -> bool:
        """Return whether the model continues texts, so that states are kept from step to step."""
        return "logits_to_keep" in self.inputs


GENERATION = ModelKind()


def known_class(config: PreTrainedConfig, kind: ModelKind) -> type[PreTrainedModel] | None:
    """Return the class that transformers would construct; None if only the model's own code knows it."""
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto

    mapping = getattr(modeling_auto, kind.mapping)
    if type(config) not in mapping:
        if hasattr(config, "auto_map"):
            return None
        instead = " LLM(model, runner='pooling') embeds texts with a model that has none." if kind is GENERATION else ""
        raise UnsupportedModel(
            f"{type(config).__name__} (model_type {config.model_type!r}) has no {kind.name} in transformers.{instead}"
        )
    known = mapping[type(config)]
    return known if isinstance(known, type) and issubclass(known, PreTrainedModel) else None


def constructor_options(config: PreTrainedConfig, kind: ModelKind) -> dict[str, Any]:
    """Return those of the kind's options that the constructor of this model takes."""
    known = known_class(config, kind) if kind.options else None
    parameters = inspect.signature(known.__init__).parameters if known is not None else {}
    return {name: value for name, value in kind.options.items() if name in parameters}
