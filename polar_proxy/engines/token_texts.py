"""The texts of recorded tokens, from the files of the model that sampled them, or from an engine that serves this
model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from polar_proxy.config import EngineSettings
from polar_proxy.engines.base import Engine
from polar_proxy.engines.bundled import POLAR_TINY_NAME
from polar_proxy.engines.chat_template import find_model_folder
from polar_proxy.engines.factory import POLAR_TINY, make_engine
from polar_proxy.errors import PolarError, RequestError
from polar_proxy.types import EngineInfo, TokenIds

Decode = Callable[[Sequence[int]], Awaitable[str]]


class NoTextsError(PolarError):
    """The tokens of a call cannot be decoded to text. The message says why."""


async def token_texts(
    answers: Sequence[TokenIds], info: EngineInfo | None, settings: EngineSettings, engine: Engine | None = None
) -> list[list[str]]:
    """Return the text of each token of the answers, with special tokens.

    If a token is only a part of a character, its text is U+FFFD. `info`: the engine that sampled the answers. `engine`:
    an entered engine, used if it serves the same model; if it does not, the model's files or the engine of `settings`
    are used. Raises NoTextsError if the tokens cannot be decoded.
    """
    if info is None:
        raise NoTextsError("No engine sampled this call.")
    known: dict[int, str] = {}
    try:
        async with _decoder(info, settings, engine) as decode:
            for token in sorted({token for answer in answers for token in answer.tolist()}):
                known[token] = await _decode_one(decode, token)
    except NotImplementedError as error:
        raise NoTextsError(f"The engine {info.engine} cannot decode tokens.") from error
    except NoTextsError:
        raise
    except (PolarError, OSError) as error:
        raise NoTextsError(str(error)) from error
    return [[known[token] for token in answer.tolist()] for answer in answers]


async def _decode_one(decode: Decode, token: int) -> str:
    try:
        return await decode([token])
    except (ValueError, OverflowError) as error:
        raise NoTextsError(
            f"The tokenizer has no token {token}, so it is not the tokenizer of the recorded model."
        ) from error


@asynccontextmanager
async def _decoder(info: EngineInfo, settings: EngineSettings, engine: Engine | None) -> AsyncIterator[Decode]:
    """Yield a function that decodes ids of the model of `info`. Raises NoTextsError."""
    if engine is not None and engine.info.model == info.model:
        yield engine.decode
    elif (file := await asyncio.to_thread(_tokenizer_file, info, settings)) is not None:
        yield await asyncio.to_thread(_load_tokenizer, file)
    elif settings.kind == "vllm" and settings.url:
        from polar_proxy.engines.vllm.client import VllmClient

        client = VllmClient(settings.url, settings.api_key, model=info.model)
        client.opened = True
        try:
            yield client.decode
        except RequestError as error:  # the server serves another model
            raise NoTextsError(f"{client.name} does not decode tokens of {info.model}: {error}") from error
        finally:
            client.close()
    elif settings.kind == info.engine and settings.kind not in ("local", "openai"):
        async with make_engine(settings) as made:
            if made.info.model != info.model:
                raise NoTextsError(_no_source(info))
            yield made.decode
    else:
        raise NoTextsError(_no_source(info))


def _tokenizer_file(info: EngineInfo, settings: EngineSettings) -> Path | None:
    """Return the tokenizer file of the model, or None if it is not found on this machine."""
    folders: list[Path | None] = []
    if settings.model_folder is not None and settings.model in (None, info.model):
        folders.append(Path(settings.model_folder).expanduser())
    if info.engine == "local":
        folders.append(POLAR_TINY if info.model == POLAR_TINY_NAME else None)
        own = Path(settings.model).expanduser() if settings.kind == "local" and settings.model else None
        folders.append(own if own is not None and own.name == info.model else None)
    else:
        folders.append(find_model_folder(info.model))
    files = (folder / "tokenizer.json" for folder in folders if folder is not None)
    return next((file for file in files if file.is_file()), None)


def _load_tokenizer(file: Path) -> Decode:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise NoTextsError("Decoding tokens needs the package tokenizers: pip install tokenizers.") from error
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise NoTextsError(f"The tokenizer {file} cannot be read: {error}.") from error

    async def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

    return decode


def _no_source(info: EngineInfo) -> str:
    return (
        f"The tokenizer of {info.model} ({info.engine}) is not known here: name the model's folder by "
        "POLAR_ENGINE__MODEL_FOLDER, or ask the server that has the engine, with --url."
    )
