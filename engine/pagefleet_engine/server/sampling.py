"""From a body's sampling fields to the engine's parameters, checked against the model."""

from __future__ import annotations

from collections.abc import Iterable

from pagefleet_protocol.openai_common import SamplingFields

from pagefleet_engine.errors import ContextTooLong, InvalidRequest
from pagefleet_engine.sampling_params import SamplingParams
from pagefleet_engine.server.ports import ServedModel

MIN_TEMPERATURE = 0.01
"""Smaller ones but 0 are raised to it, as vLLM does: logits divided by less overflow."""


def to_sampling_params(
    fields: SamplingFields, model: ServedModel, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Build the parameters of one prompt.

    Raises:
        InvalidRequest: a token id outside the vocabulary, or `min_tokens` over `max_tokens`.
    """
    given = {
        name: value
        for name in ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        if (value := getattr(fields, name)) is not None
    }
    if fields.temperature is not None:
        given["temperature"] = fields.temperature and max(fields.temperature, MIN_TEMPERATURE)
    _check_ids("logit_bias", fields.logit_bias or (), model)
    _check_ids("stop_token_ids", fields.stop_token_ids, model)
    _check_ids("allowed_token_ids", fields.allowed_token_ids or (), model)
    return SamplingParams(
        **given,
        n=fields.n,
        seed=fields.seed,
        stop=fields.stop,
        stop_token_ids=fields.stop_token_ids,
        include_stop_str_in_output=fields.include_stop_str_in_output,
        ignore_eos=fields.ignore_eos,
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=fields.logit_bias,
        allowed_token_ids=fields.allowed_token_ids,
        bad_words=fields.bad_words,
        skip_special_tokens=fields.skip_special_tokens,
    )


def fitting_max_tokens(asked: int | None, num_prompt_tokens: int, model: ServedModel, param: str) -> int:
    """Return `asked`, or what is left of the context where None.

    Raises:
        ContextTooLong: the prompt and what is asked for do not fit together.
    """
    left = model.max_model_len - num_prompt_tokens
    if asked is None:
        return left
    if asked > left:
        message = f"This model's context is {model.max_model_len} tokens; the prompt has {num_prompt_tokens}, "
        raise ContextTooLong(message + f"so '{param}' can be {left} at most, but is {asked}.", param)
    return asked


def _check_ids(name: str, ids: Iterable[int], model: ServedModel) -> None:
    top = max(ids, default=0)
    if top >= model.vocab_size:
        message = f"Invalid '{name}': token id {top} is outside the vocabulary of {model.vocab_size} tokens."
        raise InvalidRequest(message, name, "token_id_out_of_range")
