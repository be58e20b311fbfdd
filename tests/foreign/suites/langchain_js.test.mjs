// LangChain JS against Polar, through ChatOpenAI (Chat and Responses) and ChatAnthropic.
import assert from "node:assert/strict";
import test from "node:test";
import { ChatAnthropic } from "@langchain/anthropic";
import { AIMessage, HumanMessage, SystemMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const url = process.env.POLAR_URL;
const apiKey = "langchain-js";
const openai = { model: "scripted-model", apiKey, configuration: { baseURL: `${url}/v1` } };
const models = {
  "openai chat": new ChatOpenAI(openai),
  "openai responses": new ChatOpenAI({ ...openai, useResponsesApi: true }),
  anthropic: new ChatAnthropic({ model: "scripted-model", apiKey, anthropicApiUrl: url, maxTokens: 999 }),
};
const weather = tool(async ({ city }) => `${city} is sunny`, {
  name: "weather",
  description: "The weather of a city",
  schema: z.object({ city: z.string() }),
});
const person = z.object({ name: z.string(), age: z.number() });

for (const [name, model] of Object.entries(models)) {
  test(`${name}: invoke`, async () => {
    const found = await model.invoke([new SystemMessage("be brief"), new HumanMessage("good morning")]);
    assert.equal(found.text, "You said: good morning");
    assert.ok(found.usage_metadata.output_tokens > 0);
  });

  test(`${name}: stream`, async () => {
    const pieces = [];
    for await (const piece of await model.stream("good morning")) pieces.push(piece.text);
    assert.equal(pieces.join(""), "You said: good morning");
  });

  test(`${name}: tool loop`, async () => {
    const bound = model.bindTools([weather]);
    const asked = new HumanMessage("weather in 'Oslo'");
    const first = await bound.invoke([asked]);
    assert.deepEqual(first.tool_calls[0].args, { city: "Oslo" });
    const result = new ToolMessage({ content: await weather.invoke(first.tool_calls[0].args), tool_call_id: first.tool_calls[0].id });
    assert.equal((await bound.invoke([asked, first, result])).text, "You said: weather in 'Oslo'");
  });

  test(`${name}: streamed tool call`, async () => {
    let whole;
    for await (const piece of await model.bindTools([weather]).stream("weather in 'Oslo'")) {
      whole = whole ? whole.concat(piece) : piece;
    }
    assert.deepEqual(whole.tool_calls[0].args, { city: "Oslo" });
  });

  test(`${name}: structured output`, async () => {
    assert.deepEqual(await model.withStructuredOutput(person).invoke("'Ada' is 36"), { name: "Ada", age: 36 });
  });

  test(`${name}: batch and history`, async () => {
    const history = [new HumanMessage("one"), new AIMessage("two"), new HumanMessage("three")];
    const found = await model.batch([history, "four"]);
    assert.deepEqual(found.map((message) => message.text), ["You said: three", "You said: four"]);
  });
}
