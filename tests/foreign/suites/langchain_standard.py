"""The standard chat-model suites of langchain-tests, for LangChain's OpenAI and Anthropic classes against Polar."""

import base64
import os

import httpx
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

URL = os.environ["POLAR_URL"]
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class _OpenAI:
    chat_model_class = ChatOpenAI
    supports_json_mode = True
    supports_image_inputs = True
    supports_image_tool_message = True
    supports_model_override = True
    model_override_value = "another-model"

    @property
    def chat_model_params(self):
        return {"model": "scripted-model", "base_url": f"{URL}/v1", "api_key": "langchain", "stream_usage": True}


class _Responses(_OpenAI):
    supports_json_mode = False

    @property
    def chat_model_params(self):
        return {**super().chat_model_params, "use_responses_api": True}


class _Anthropic:
    chat_model_class = ChatAnthropic
    supports_image_inputs = True
    supports_image_tool_message = True
    supports_anthropic_inputs = True
    supports_model_override = True
    model_override_value = "another-model"

    @property
    def chat_model_params(self):
        return {"model": "scripted-model", "base_url": URL, "api_key": "langchain", "max_tokens": 4096}


class TestOpenAIUnit(_OpenAI, ChatModelUnitTests):
    @pytest.mark.xfail(reason="compares with a file of LangChain's own repository")
    def test_serdes(self, model, snapshot):
        super().test_serdes(model, snapshot)


class TestOpenAI(_OpenAI, ChatModelIntegrationTests):
    pass


class TestResponsesUnit(_Responses, ChatModelUnitTests):
    @pytest.mark.xfail(reason="compares with a file of LangChain's own repository")
    def test_serdes(self, model, snapshot):
        super().test_serdes(model, snapshot)


class TestResponses(_Responses, ChatModelIntegrationTests):
    pass


class TestAnthropicUnit(_Anthropic, ChatModelUnitTests):
    @property
    def chat_model_params(self):
        return {"model": "scripted-model", "base_url": URL, "api_key": "langchain"}

    @pytest.mark.xfail(reason="compares with a file of LangChain's own repository")
    def test_serdes(self, model, snapshot):
        super().test_serdes(model, snapshot)


class TestAnthropic(_Anthropic, ChatModelIntegrationTests):
    pass


@pytest.fixture(autouse=True)
def _local_network(socket_enabled, monkeypatch):
    """Let the tests connect to Polar, and give them a picture for those that they would download."""
    monkeypatch.setattr(httpx, "get", lambda url, **_: httpx.Response(200, content=PICTURE))
