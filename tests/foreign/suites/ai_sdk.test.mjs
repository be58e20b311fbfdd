// The Vercel AI SDK against Polar, through its OpenAI (Responses and Chat), Anthropic, Google and OpenAI-compatible
// providers: texts, streams, tools, objects, reasoning, several turns, errors.
import assert from "node:assert/strict";
import test from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createGoogleGenerativeAI } from "@ai-sdk/google";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.env.POLAR_URL;
const apiKey = "ai-sdk";
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const models = {
  "openai responses": openai.responses("scripted-model"),
  "openai chat": openai.chat("scripted-model"),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey })("scripted-model"),
  google: createGoogleGenerativeAI({ baseURL: `${url}/v1beta`, apiKey })("scripted-model"),
  compatible: createOpenAICompatible({ name: "polar", baseURL: `${url}/v1`, apiKey, includeUsage: true })("scripted-model"),
};
const structured = { ...models };
structured.compatible = createOpenAICompatible({
  name: "polar",
  baseURL: `${url}/v1`,
  apiKey,
  supportsStructuredOutputs: true,
})("scripted-model");
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string(), days: z.number() }),
  execute: async ({ city, days }) => `${city} is sunny for ${days} days`,
});
const clock = tool({ description: "The time", inputSchema: z.object({}), execute: async () => "noon" });
const person = z.object({ name: z.string(), age: z.number(), tags: z.array(z.string()) });

for (const [name, model] of Object.entries(models)) {
  test(`${name}: text`, async () => {
    const found = await generateText({ model, prompt: "good morning", maxOutputTokens: 999 });
    assert.equal(found.text, "You said: good morning");
    assert.equal(found.finishReason, "stop");
    assert.ok(found.usage.inputTokens > 0 && found.usage.outputTokens > 0);
    assert.deepEqual(found.warnings ?? [], []);
  });

  test(`${name}: streamed text`, async () => {
    const found = streamText({ model, prompt: "good morning" });
    const pieces = [];
    for await (const piece of found.textStream) pieces.push(piece);
    assert.equal(pieces.join(""), "You said: good morning");
    assert.ok(pieces.length > 1);
    assert.equal(await found.finishReason, "stop");
    assert.ok((await found.usage).outputTokens > 0);
  });

  test(`${name}: every part of a stream`, async () => {
    const kinds = new Set();
    for await (const part of streamText({ model, prompt: "hi" }).fullStream) {
      assert.notEqual(part.type, "error", String(part.error));
      kinds.add(part.type);
    }
    for (const kind of ["start", "text-start", "text-delta", "text-end", "finish"]) assert.ok(kinds.has(kind), kind);
  });

  test(`${name}: system and several messages`, async () => {
    const found = await generateText({
      model,
      system: "be brief",
      messages: [
        { role: "user", content: "one" },
        { role: "assistant", content: "two" },
        { role: "user", content: [{ type: "text", text: "three" }] },
      ],
    });
    assert.equal(found.text, "You said: three");
  });

  test(`${name}: tool call`, async () => {
    const found = await generateText({ model, prompt: "weather in 'Oslo' for 2 days", tools: { weather } });
    assert.equal(found.finishReason, "tool-calls");
    assert.deepEqual(found.toolCalls[0].input, { city: "Oslo", days: 2 });
    assert.equal(found.toolResults[0].output, "Oslo is sunny for 2 days");
  });

  test(`${name}: streamed tool call`, async () => {
    const found = streamText({ model, prompt: "weather in 'Oslo' for 2 days", tools: { weather } });
    let inputs = 0;
    for await (const part of found.fullStream) inputs += part.type === "tool-input-delta";
    assert.deepEqual((await found.toolCalls)[0].input, { city: "Oslo", days: 2 });
    assert.ok(inputs > 0);
  });

  test(`${name}: tool without arguments`, async () => {
    const found = await generateText({ model, prompt: "what time is it", tools: { clock } });
    assert.equal(found.toolResults[0].output, "noon");
  });

  test(`${name}: several calls in one answer`, async () => {
    const found = await generateText({ model, prompt: "use every tool", tools: { weather, clock } });
    assert.deepEqual(found.toolCalls.map((call) => call.toolName), ["weather", "clock"]);
  });

  test(`${name}: tool loop`, async () => {
    const found = await generateText({ model, prompt: "weather", tools: { weather }, stopWhen: stepCountIs(4) });
    assert.equal(found.steps.length, 2);
    assert.equal(found.text, "You said: weather");
  });

  test(`${name}: streamed tool loop`, async () => {
    const found = streamText({ model, prompt: "weather", tools: { weather }, stopWhen: stepCountIs(4) });
    assert.equal(await found.text, "You said: weather");
    assert.equal((await found.steps).length, 2);
  });

  test(`${name}: second turn after a tool loop`, async () => {
    const first = await generateText({ model, prompt: "please think", tools: { weather }, stopWhen: stepCountIs(4) });
    const messages = [{ role: "user", content: "please think" }, ...first.response.messages];
    const second = await generateText({ model, messages: [...messages, { role: "user", content: "thanks" }] });
    assert.equal(second.text, "You said: thanks");
  });

  test(`${name}: named tool`, async () => {
    const toolChoice = { type: "tool", toolName: "clock" };
    const found = await generateText({ model, prompt: "hi", tools: { weather, clock }, toolChoice });
    assert.equal(found.toolCalls[0].toolName, "clock");
  });

  test(`${name}: no tool`, async () => {
    const found = await generateText({ model, prompt: "hi", tools: { weather }, toolChoice: "none" });
    assert.equal(found.text, "You said: hi");
  });

  test(`${name}: length limit`, async () => {
    const found = await generateText({ model, prompt: "a long text", maxOutputTokens: 5 });
    assert.equal(found.finishReason, "length");
  });

  test(`${name}: sampling settings`, async () => {
    const found = await generateText({ model, prompt: "hi", temperature: 0.3, stopSequences: ["said"], topP: 0.9 });
    assert.ok(found.text.length > 0);
  });

  test(`${name}: image`, async () => {
    const image = Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==", "base64");
    const content = [{ type: "text", text: "look" }, { type: "image", image, mediaType: "image/png" }];
    const found = await generateText({ model, messages: [{ role: "user", content }] });
    assert.equal(found.text, "You said: look");
  });

  test(`${name}: error`, async () => {
    const bad = generateText({ model, prompt: "hi", topP: 7, maxRetries: 0 });
    await assert.rejects(bad, (error) => error.statusCode === 400 && error.message.length > 0);
  });

  test(`${name}: broken off`, async () => {
    const stop = new AbortController();
    const found = streamText({ model, prompt: "hi", abortSignal: stop.signal, onError: () => {} });
    stop.abort();
    const kinds = [];
    for await (const part of found.fullStream) kinds.push(part.type);
    assert.ok(kinds.includes("abort"), kinds.join());
  });
}

for (const [name, model] of Object.entries(structured)) {
  test(`${name}: object`, async () => {
    const found = await generateText({ model, prompt: "'Ada' is 36", output: Output.object({ schema: person }) });
    assert.deepEqual(found.output, { name: "Ada", age: 36, tags: ["Ada"] });
  });

  test(`${name}: streamed object`, async () => {
    const found = streamText({ model, prompt: "'Ada' is 36", output: Output.object({ schema: person }) });
    let parts = 0;
    for await (const _ of found.partialOutputStream) parts += 1;
    assert.deepEqual(await found.output, { name: "Ada", age: 36, tags: ["Ada"] });
    assert.ok(parts > 1);
  });

  test(`${name}: choice`, async () => {
    const output = Output.choice({ options: ["sunny", "rainy"] });
    assert.equal((await generateText({ model, prompt: "hi", output })).output, "sunny");
  });
}

for (const name of ["openai responses", "openai chat", "compatible", "anthropic"]) {
  test(`${name}: reasoning`, async () => {
    const providerOptions = { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } };
    const found = await generateText({ model: models[name], prompt: "please think", providerOptions });
    assert.equal(found.text, "You said: please think");
    if (name !== "openai chat") assert.equal(found.reasoningText, "Let me think."); // the chat provider has no reasoning
  });
}

test("openai responses: previous response", async () => {
  const model = models["openai responses"];
  const first = await generateText({ model, prompt: "one" });
  const previousResponseId = first.providerMetadata.openai.responseId;
  const second = await generateText({ model, prompt: "two", providerOptions: { openai: { previousResponseId } } });
  assert.equal(second.text, "You said: two");
});

test("openai responses: conversation", async () => {
  const headers = { authorization: `Bearer ${apiKey}`, "content-type": "application/json" };
  const made = await fetch(`${url}/v1/conversations`, { method: "POST", headers, body: "{}" });
  const { id: conversation } = await made.json();
  const options = { model: models["openai responses"], providerOptions: { openai: { conversation } } };
  await generateText({ ...options, prompt: "one" });
  assert.equal((await generateText({ ...options, prompt: "two" })).text, "You said: two");
  const items = await (await fetch(`${url}/v1/conversations/${conversation}/items`, { headers })).json();
  assert.equal(items.data.length, 4);
});

test("openai responses: store false", async () => {
  const model = models["openai responses"];
  const providerOptions = { openai: { store: false, include: ["reasoning.encrypted_content"] } };
  const first = await generateText({ model, prompt: "think", tools: { weather }, providerOptions, stopWhen: stepCountIs(3) });
  assert.equal(first.text, "You said: think");
});
