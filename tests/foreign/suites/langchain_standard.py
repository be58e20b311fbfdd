"""The standard chat-model suites of langchain-tests, for LangChain's OpenAI and Anthropic classes against Polar."""

import os

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

URL = os.environ["POLAR_URL"]


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
    pass


class TestOpenAI(_OpenAI, ChatModelIntegrationTests):
    pass


class TestResponsesUnit(_Responses, ChatModelUnitTests):
    pass


class TestResponses(_Responses, ChatModelIntegrationTests):
    pass


class TestAnthropicUnit(_Anthropic, ChatModelUnitTests):
    pass


class TestAnthropic(_Anthropic, ChatModelIntegrationTests):
    pass


@pytest.fixture(autouse=True)
def _network_allowed(socket_enabled):
    """pytest-socket, which langchain-tests installs, is not to stop the connections to Polar."""
