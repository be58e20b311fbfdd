// The token view: lines of equal height, of which only the visible ones are in the page.

const box = document.querySelector("#tokens");
const space = box.querySelector(".space");
const facts = document.querySelector("#token");
const LINE = 20; // pixels; as in polar.css
const MARGIN = 12; // lines above and below the visible ones

const source = box.dataset.source;
const head = await getJson(`${source}/head`);
const ids = new Int32Array(head.length);
const logprobs = new Float32Array(head.length).fill(NaN);
const texts = new Map(); // token id -> text
const findings = new Map(head.findings.map((one) => [one.at, one.text]));
const hasEngine = "engine" in box.dataset; // it computes importance ratios and alternatives on request
const REST_MS = 250; // the reader stays this long at a token before its alternatives are computed
const alternatives = new Map(); // token -> what the server answered
let ratios = null; // importance ratio of each token, once it was asked for
let loaded = 0; // tokens that have arrived
let lines = []; // index of the first token of each line
let columns = 80;
let columnAt = 0; // of the last line, while it is laid out
let fresh = false; // the last line has no token yet
let here = -1; // the chosen token
let described = -1; // the token whose facts are shown
let resting = null; // timer until the alternatives of that token are asked for
let hits = []; // tokens at which the search begins to match
let hitEnds = [];
let shown = new Map(); // line number -> element
let colour = document.querySelector("#colour").value;

async function load() {
  while (loaded < head.length) {
    const chunk = await getJson(`${source}/tokens?start=${loaded}`);
    ids.set(chunk.ids, chunk.start);
    chunk.logprobs.forEach((value, index) => { if (value !== null) logprobs[chunk.start + index] = value; });
    for (const [id, text] of Object.entries(chunk.texts)) texts.set(Number(id), text);
    if (chunk.problem && chunk.start === 0) showProblem(`The tokens are shown without their texts. ${chunk.problem}`);
    loaded += chunk.ids.length;
    layOut(chunk.start);
    if (chunk.start === 0) openHash();
  }
  openHash();
}

async function getJson(url) {
  const answer = await fetch(url, { credentials: "same-origin" });
  if (!answer.ok) throw new Error(`The server answers ${answer.status} to ${url}.`);
  return answer.json();
}

/** Return the server's answer, or its problem: an engine may be busy or gone. */
async function ask(url) {
  try {
    return await getJson(url);
  } catch (error) {
    return { problem: error.message };
  }
}

function showProblem(text) {
  const note = document.createElement("p");
  note.className = "problem";
  note.textContent = text;
  box.parentElement.before(note);
}

// Layout

/** Return what a token shows: up to its last line break. What follows it, an indentation, begins the next line. */
function displayed(index) {
  const text = texts.get(ids[index]);
  if (text === undefined) return `⟨${ids[index]}⟩`;
  return text === "" ? "∅" : visible(text.slice(0, text.lastIndexOf("\n") + 1 || undefined));
}

function indentation(index) {
  const text = texts.get(ids[index]) ?? "";
  const end = text.lastIndexOf("\n");
  return end < 0 ? "" : visible(text.slice(end + 1));
}

const visible = (text) => text.replace(/[\n\r]/g, "↵").replace(/\t/g, "⇥   ");

function widthOf(text) {
  let width = 0;
  for (const letter of text) width += letter.codePointAt(0) >= 0x1100 ? 2 : 1;
  return width;
}

/** Divide the tokens from `start` on into lines. A line ends after a line break and before another origin. */
function layOut(start = 0) {
  if (start === 0) { lines = []; columnAt = Infinity; fresh = false; }
  else if (fresh) lines.push(start);
  const starts = new Set(head.spans.map((span) => span.at));
  for (let index = start; index < loaded; index++) {
    const text = displayed(index);
    const width = widthOf(text);
    if (!fresh && (columnAt + width > columns || starts.has(index))) { lines.push(index); columnAt = 0; }
    columnAt += width;
    if (texts.get(ids[index])?.includes("\n")) {
      if (index + 1 < loaded) lines.push(index + 1);
      columnAt = widthOf(indentation(index));
      fresh = true;
    } else {
      fresh = false;
    }
  }
  space.style.height = `${Math.max(lines.length, 1) * LINE}px`;
  redraw();
}

function measure() {
  const probe = document.createElement("span");
  probe.textContent = "0".repeat(100);
  probe.style.cssText = "position:absolute;visibility:hidden;white-space:pre";
  box.append(probe);
  const letter = probe.getBoundingClientRect().width / 100;
  probe.remove();
  return Math.max(20, Math.floor((box.clientWidth - 8) / letter - 7));
}

new ResizeObserver(() => {
  const now = measure();
  if (now === columns) return draw();
  const kept = lines[Math.floor(box.scrollTop / LINE)] ?? 0;
  columns = now;
  layOut();
  box.scrollTop = lineOf(kept) * LINE;
}).observe(box);

/** Return the number of the line that has a token. */
const lineOf = (index) => lastWhere(lines.length, (line) => lines[line] <= index);

/** Return the last of the numbers below `count` for which `holds`, by halving. It holds for all numbers before that. */
function lastWhere(count, holds) {
  let low = 0, high = count - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (holds(middle)) low = middle; else high = middle - 1;
  }
  return low;
}

// Drawing

function redraw() {
  shown.clear();
  space.replaceChildren();
  draw();
}

function draw() {
  const first = Math.max(0, Math.floor(box.scrollTop / LINE) - MARGIN);
  const last = Math.min(lines.length, Math.ceil((box.scrollTop + box.clientHeight) / LINE) + MARGIN);
  for (const [number, line] of shown) {
    if (number < first || number >= last) { line.remove(); shown.delete(number); }
  }
  for (let number = first; number < last; number++) {
    if (!shown.has(number)) shown.set(number, space.appendChild(makeLine(number)));
  }
}
box.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });

function makeLine(number) {
  const line = document.createElement("div");
  const start = lines[number], end = lines[number + 1] ?? loaded;
  const span = spanOf(start);
  line.className = span.kind === "sampled" ? "line sampled" : "line";
  line.style.top = `${number * LINE}px`;
  line.dataset.at = start;
  if (start > 0 && indentation(start - 1)) line.append(makeToken(start - 1, spanOf(start - 1), indentation(start - 1)));
  for (let index = start; index < end; index++) line.append(makeToken(index, span, displayed(index)));
  return line;
}

function makeToken(index, span, text) {
  const token = document.createElement("span");
  token.textContent = text;
  token.dataset.index = index;
  token.className = `t ${span.kind === "sampled" ? "s" : "c"} ${colourOf(index, span)}${marks(index, span)}`;
  return token;
}

function colourOf(index, span) {
  if (colour === "origin") return `o${head.spans.indexOf(span) % 4}`;
  if (span.kind !== "sampled" || colour === "none") return "";
  if (colour === "advantage") {
    const value = head.facts.advantage;
    return value === 0 ? "" : `${value > 0 ? "plus" : "minus"}${Math.abs(value) >= 0.8 ? 2 : 1}`;
  }
  if (colour === "ratio") return RATIOS.find(([, , holds]) => holds(ratios?.[index] ?? 1))?.[0] ?? "";
  const probability = Math.exp(logprobs[index]);
  const step = head.scale.findIndex(([least]) => probability >= least);
  return step < 0 ? "" : `p${step}`;
}

const RATIOS = [
  ["minus2", "below 0.8", (ratio) => ratio < 0.8],
  ["minus1", "below 0.95", (ratio) => ratio < 0.95],
  ["plus2", "above 1.25", (ratio) => ratio > 1.25],
  ["plus1", "above 1.05", (ratio) => ratio > 1.05],
];

function marks(index, span) {
  const hit = hits.length > 0 ? hitAt(index) : -1;
  return (index === here ? " here" : "") + (findings.has(index) ? " finding" : "") + (hit >= 0 ? " hit" : "") +
    (span.versions.some(([at]) => at > 0 && at + span.at === index) ? " start" : "");
}

const spanOf = (index) => head.spans[lastWhere(head.spans.length, (span) => head.spans[span].at <= index)];

document.querySelector("#colour").addEventListener("change", async (event) => {
  colour = event.target.value;
  drawLegend();
  if (colour === "ratio" && ratios === null) {
    document.querySelector("#legend").textContent = "computing…";
    const answer = await ask(`${source}/ratios`);
    if (answer.problem) showProblem(answer.problem); else ratios = answer.ratios;
    drawLegend();
  }
  redraw();
});
drawLegend();

function drawLegend() {
  const entries = {
    logprob: head.scale.map(([, text], step) => [`p${step}`, text]),
    ratio: RATIOS,
    advantage: [["plus2", "made likelier"], ["minus2", "made less likely"]],
    origin: [],
    none: [],
  }[colour];
  document.querySelector("#legend").replaceChildren(...entries.map(([name, text]) => {
    const sample = document.createElement("b");
    sample.className = name;
    sample.textContent = text;
    return sample;
  }));
}

// One token

box.addEventListener("mouseover", (event) => {
  const token = event.target.closest(".t");
  if (token !== null) describe(Number(token.dataset.index));
});
box.addEventListener("click", (event) => {
  const token = event.target.closest(".t");
  if (token !== null) choose(Number(token.dataset.index));
});
box.addEventListener("mouseleave", () => { if (here >= 0) describe(here); });
box.addEventListener("keydown", (event) => {
  const line = lineOf(Math.max(here, 0));
  const column = here - lines[line];
  const next = {
    ArrowRight: here + 1,
    ArrowLeft: here - 1,
    ArrowDown: Math.min((lines[line + 1] ?? here) + column, (lines[line + 2] ?? loaded) - 1),
    ArrowUp: Math.min((lines[line - 1] ?? 0) + column, Math.max(lines[line] - 1, 0)),
    Home: lines[line],
    End: (lines[line + 1] ?? loaded) - 1,
  }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  choose(Math.min(Math.max(next, 0), loaded - 1));
});

/** Choose a token: show it, describe it, and name it in the address. */
function choose(index, { centre = false } = {}) {
  here = index;
  const top = lineOf(index) * LINE;
  if (centre) box.scrollTop = top - box.clientHeight / 2;
  else if (top < box.scrollTop) box.scrollTop = top;
  else if (top + LINE > box.scrollTop + box.clientHeight) box.scrollTop = top + LINE - box.clientHeight;
  history.replaceState(null, "", `#${index}`);
  redraw();
  describe(index);
}

/** Show the facts and the alternatives of a token. If the reader stays at it, ask for alternatives that are missing. */
function describe(index) {
  const text = document.createElement("p");
  text.className = "big";
  text.textContent = JSON.stringify(texts.get(ids[index]) ?? null);
  const other = alternatives.get(index);
  facts.replaceChildren(text, listFacts(factsOf(index)), ...describeAlternatives(index, other));
  described = index;
  clearTimeout(resting);
  if (hasEngine && index > 0 && other === undefined) resting = setTimeout(() => findAlternatives(index), REST_MS);
}

/** Return the facts of a token: name, value and, for a call, its id. */
function factsOf(index) {
  const span = spanOf(index);
  const inside = index - span.at + span.start;
  const sampled = span.kind === "sampled";
  const found = [["position", index], ["id", ids[index]]];
  if (sampled) {
    const value = logprobs[index];
    found.push(["log-probability", Number.isNaN(value) ? "not reported" : value.toFixed(4)]);
    if (!Number.isNaN(value)) found.push(["probability", percent(Math.exp(value))]);
  }
  found.push(["trained", sampled ? (head.facts.grade === undefined ? "sampled" : "yes: loss mask 1") : "no: context"]);
  if (sampled && head.facts.advantage != null) found.push(["advantage", head.facts.advantage]);
  if (ratios?.[index] != null) found.push(["importance ratio", ratios[index]]);
  const entropy = alternatives.get(index)?.least_entropy;
  if (entropy !== undefined) found.push(["entropy", `at least ${entropy} nats`]);
  found.push([sampled ? "position in answer" : "position in prompt", `${inside} of call`, span.call_id]);
  found.push(["edge", span.edge], ["prompt", span.prompt_mode + (span.prompt_reason ? `: ${span.prompt_reason}` : "")]);
  if (sampled) {
    const version = span.versions.filter(([at]) => at <= inside).at(-1)?.[1];
    found.push(["policy version", version ?? "unknown"]);
    if (span.temperature !== null) found.push(["temperature", span.temperature]);
    if (span.reasoning_tokens !== null && inside < span.reasoning_tokens) found.push(["part", "reasoning"]);
  }
  if (findings.has(index)) found.push(["finding", findings.get(index)]);
  return found;
}

function listFacts(found) {
  const list = document.createElement("dl");
  list.className = "facts";
  for (const [name, value, callId] of found) {
    const term = document.createElement("dt"), description = document.createElement("dd");
    term.textContent = name;
    description.textContent = callId ? `${value} ` : value;
    if (callId) {
      const link = document.createElement("a");
      link.href = `/view/calls/${encodeURIComponent(callId)}`;
      link.className = "id";
      link.textContent = callId.length > 16 ? `${callId.slice(0, 9)}…${callId.slice(-4)}` : callId;
      description.append(link);
    }
    list.append(term, description);
  }
  return list;
}

async function findAlternatives(index) {
  alternatives.set(index, await ask(`${source}/alternatives?at=${index}`));
  if (described === index) describe(index);
}

/** Return the elements that show what the engine samples here with its present weights. */
function describeAlternatives(index, answer) {
  if (answer === undefined) return [];
  const title = document.createElement("h2");
  if (answer.problem) {
    title.textContent = answer.problem;
    return [title];
  }
  title.textContent = answer.policy_version === null ? "Alternatives now" : `Alternatives, policy version ${answer.policy_version}`;
  const list = document.createElement("ol");
  list.className = "alternatives";
  for (const [id, text, logprob] of answer.alternatives) {
    const item = document.createElement("li"), token = document.createElement("code"), share = document.createElement("span");
    token.textContent = JSON.stringify(text);
    if (id === ids[index]) token.className = "here";
    share.textContent = percent(Math.exp(logprob));
    item.append(token, share);
    list.append(item);
  }
  return [title, list];
}

const percent = (share) => (share >= 0.001 ? `${(share * 100).toPrecision(3)} %` : share.toExponential(2));

// Search, and going to a position

const search = document.querySelector("#search");
let searched = null;
let joined = null; // {text, starts}: the text of all tokens in one, made for the first search

search.addEventListener("submit", (event) => {
  event.preventDefault();
  const wanted = search.querySelector("input").value;
  if (wanted !== searched || joined?.loaded !== loaded) find(wanted);
  searched = wanted;
  if (hits.length > 0) {
    const next = hits.findIndex((index) => index > here);
    choose(hits[next < 0 ? 0 : next], { centre: true });
    search.querySelector("output").textContent = `${(next < 0 ? 0 : next) + 1} of ${hits.length}`;
  } else {
    search.querySelector("output").textContent = wanted ? "not found" : "";
    redraw();
  }
});

function find(wanted) {
  hits = [];
  hitEnds = [];
  if (/^#\d+$/.test(wanted)) {
    const id = Number(wanted.slice(1));
    for (let index = 0; index < loaded; index++) if (ids[index] === id) { hits.push(index); hitEnds.push(index); }
  } else if (wanted) {
    joined = joined?.loaded === loaded ? joined : join();
    const text = wanted.toLowerCase();
    for (let at = joined.text.indexOf(text); at >= 0; at = joined.text.indexOf(text, at + text.length)) {
      hits.push(tokenAt(at));
      hitEnds.push(tokenAt(at + text.length - 1));
    }
  }
}

function join() {
  const starts = new Int32Array(loaded);
  const parts = [];
  let length = 0;
  for (let index = 0; index < loaded; index++) {
    const text = (texts.get(ids[index]) ?? "").toLowerCase();
    starts[index] = length;
    length += text.length;
    parts.push(text);
  }
  return { text: parts.join(""), starts, loaded };
}

const tokenAt = (letter) => lastWhere(joined.starts.length, (token) => joined.starts[token] <= letter);

/** Return the number of the match that has a token, or -1. */
function hitAt(index) {
  const match = lastWhere(hits.length, (number) => hits[number] <= index);
  return hits[match] <= index && index <= hitEnds[match] ? match : -1;
}

document.querySelector("#position").addEventListener("change", (event) => {
  const index = Math.min(Number(event.target.value), loaded - 1);
  if (index >= 0) choose(index, { centre: true });
});
for (const button of document.querySelectorAll("[data-position]")) {
  button.addEventListener("click", () => choose(Math.min(Number(button.dataset.position), loaded - 1), { centre: true }));
}
addEventListener("hashchange", openHash);

function openHash() {
  const index = Number(location.hash.slice(1));
  if (location.hash.length > 1 && index !== here && index < loaded) choose(index, { centre: true });
}

layOut();
await load();
