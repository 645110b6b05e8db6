"""/tokenize and /detokenize, vLLM's endpoints."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from mlaforge.serving.protocol import ChatRequest
from mlaforge.serving.service import Service
from mlaforge.serving.strict import Strict, Whole, api_error
from mlaforge.serving.wire import ApiError

T = TypeVar("T", bound=Strict)


class TokenizeRequest(Strict):
    """Request to tokenize a text; with `messages` instead, the fields of a chat request."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[Whole], Field(max_length=1_000_000)]


def tokenize(service: Service, payload: dict[str, Any]) -> dict[str, Any]:
    """Return the token ids of a text, or of the prompt that a chat's messages become. Raises ApiError."""
    if "messages" in payload:
        names = payload.pop("return_token_strs", False)
        request = ChatRequest.read(payload)
        service.check_model(request.model)
        ids = service.chat.prompt(request)
    else:
        text = _validated(TokenizeRequest, payload)
        service.check_model(text.model)
        ids, names = service.prompts.encode(text.prompt, text.add_special_tokens), text.return_token_strs
    result: dict[str, Any] = {"count": len(ids), "max_model_len": service.engine.engine.max_model_len, "tokens": ids}
    if names is True:
        result["token_strs"] = [service.tokens.text(token) for token in ids]
    return result


def detokenize(service: Service, payload: dict[str, Any]) -> dict[str, Any]:
    """Return the text of token ids. Raises ApiError."""
    request, inner = _validated(DetokenizeRequest, payload), service.engine.engine
    service.check_model(request.model)
    for index, token in enumerate(request.tokens):
        if not 0 <= token < inner.vocab_size:
            message = f"token {token} is not below the vocabulary's size {inner.vocab_size}"
            raise ApiError(400, message, f"tokens.{index}")
    return {"prompt": inner.tokenizer.decode(request.tokens, skip_special_tokens=False)}


def _validated(model: type[T], payload: dict[str, Any]) -> T:
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        raise api_error(error, payload) from error
