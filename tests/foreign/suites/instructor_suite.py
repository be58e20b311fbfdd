"""Instructor against Polar, with the official SDKs of OpenAI and Anthropic."""

import os

import anthropic
import instructor
import openai
import pytest
from pydantic import BaseModel

URL = os.environ["POLAR_URL"]
ADA = {"name": "Ada", "age": 36}
"""Compared as a dictionary, because Instructor returns a subclass of the class that it is given."""
ASKED = [{"role": "user", "content": "'Ada' is 36"}]


class Person(BaseModel):
    name: str
    age: int


def _openai(mode):
    client = openai.OpenAI(base_url=URL + "/v1", api_key="instructor")
    return instructor.from_openai(client, mode=mode)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA])
def test_openai(mode):
    found = _openai(mode).chat.completions.create(model="m", messages=ASKED, response_model=Person)
    assert found.model_dump() == ADA


def test_openai_partial():
    parts = _openai(instructor.Mode.TOOLS).chat.completions.create_partial(
        model="m", messages=ASKED, response_model=Person
    )
    assert list(parts)[-1].age == 36


def test_openai_iterable():
    found = _openai(instructor.Mode.TOOLS).chat.completions.create_iterable(
        model="m", messages=ASKED, response_model=Person
    )
    assert [person.model_dump() for person in found] == [ADA]


def test_openai_responses():
    found = _openai(instructor.Mode.RESPONSES_TOOLS).chat.completions.create(
        model="m", messages=ASKED, response_model=Person
    )
    assert found.model_dump() == ADA


def test_anthropic():
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key="instructor"))
    found = client.messages.create(model="m", max_tokens=99, messages=ASKED, response_model=Person)
    assert found.model_dump() == ADA
