// What all pages share: live updates, keys, local times.

const main = document.querySelector("main");
const live = document.querySelector("#live");
const PART_MS = 2000; // between two requests for the state of server and engine, which no event reports
const POLL_MS = 5000; // between two updates without a stream of changes
const QUIET_MS = 300; // between two updates, however many changes are reported
const REST = 10; // an update waits for as many times the duration of the last one, so that it does not load a slow server
const sent = new WeakMap(); // live part -> its content as the server sent it last
let waiting = null; // timer of the next update
let earliest = 0; // time of the next update

for (const part of document.querySelectorAll("[data-live]")) sent.set(part, part.innerHTML);
showTimes(document);
document.addEventListener("keydown", onKey);
document.querySelector("#keys-button").addEventListener("click", () => document.querySelector("#keys").showModal());
const restart = whileVisible(followChanges);
for (const part of document.querySelectorAll("[data-part]")) {
  if ("once" in part.dataset) fill(part); else whileVisible(() => every(PART_MS, () => fill(part)));
}

/** Replace the times of the server's zone by those of the reader's. */
export function showTimes(root) {
  for (const time of root.querySelectorAll("time[datetime]:not([title])")) {
    const at = new Date(time.dateTime);
    time.title = time.textContent + " UTC";
    const two = (number) => String(number).padStart(2, "0");
    const clock = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
    const isToday = at.toDateString() === new Date().toDateString();
    time.textContent = isToday ? clock : `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock}`;
  }
}

/** Run `start` while the page is visible; it returns the function that stops it. Hidden pages cost the server nothing.
 * Return a function that stops it and runs `start` again. */
function whileVisible(start) {
  let stop = document.hidden ? null : start();
  const again = () => {
    stop?.();
    stop = document.hidden ? null : start();
  };
  document.addEventListener("visibilitychange", again);
  return again;
}

function every(milliseconds, work) {
  work();
  const timer = setInterval(work, milliseconds);
  return () => clearInterval(timer);
}

/** Update the page at each change that the server reports. While no stream is open, because the server has too many or
 * cannot be reached, update it every few seconds. */
function followChanges() {
  const followed = document.body.dataset.follow;
  if (followed === undefined) return null;
  let timer = null;
  const changes = new EventSource(`/view/changes/${followed}`);
  changes.addEventListener("change", soon);
  changes.onopen = () => {
    clearInterval(timer);
    timer = null;
    show("live");
  };
  changes.onerror = () => {
    timer ??= setInterval(update, POLL_MS);
    show(changes.readyState === EventSource.CLOSED ? `updates every ${POLL_MS / 1000} s` : "reconnecting");
  };
  return () => {
    changes.close();
    clearInterval(timer);
    show("");
  };
}

function show(state) {
  live.textContent = state;
  live.classList.toggle("on", state === "live");
}

function soon() {
  waiting ??= setTimeout(async () => {
    waiting = null; // a change from here on needs another update
    const started = performance.now();
    earliest = started + QUIET_MS;
    await update();
    const ended = performance.now();
    earliest = ended + Math.max(QUIET_MS, REST * (ended - started));
  }, earliest - performance.now());
}

/** Fetch this page again and replace its live parts that changed. */
async function update() {
  const page = await get(location.href);
  if (page === null) return;
  const fresh = new DOMParser().parseFromString(page, "text/html");
  for (const part of document.querySelectorAll("[data-live]")) {
    const next = fresh.getElementById(part.id);
    const content = next?.innerHTML;
    if (next === null || sent.get(part) === content) continue;
    sent.set(part, content);
    const open = [...part.querySelectorAll("details")].map((details) => details.open);
    const focused = document.activeElement?.closest("[data-live]") === part ? document.activeElement.getAttribute("href") : null;
    part.replaceChildren(...next.childNodes);
    part.querySelectorAll("details").forEach((details, index) => { if (index < open.length) details.open = open[index]; });
    showTimes(part);
    if (focused !== null) part.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
    part.dispatchEvent(new CustomEvent("replaced", { bubbles: true }));
  }
  if ("follow" in document.body.dataset && !("follow" in fresh.body.dataset)) end();
}

/** Stop following records that change no more. */
function end() {
  delete document.body.dataset.follow;
  restart();
  document.querySelectorAll("[data-once]").forEach(fill);
}

async function fill(part) {
  const content = await get(part.dataset.part);
  if (content === null || sent.get(part) === content) return;
  sent.set(part, content);
  part.replaceChildren(...new DOMParser().parseFromString(content, "text/html").body.childNodes);
  showTimes(part);
}

/** Return the text of a page; null if the server does not answer or refuses. */
export async function get(url) {
  try {
    const answer = await fetch(url, { credentials: "same-origin" });
    return answer.ok ? await answer.text() : null;
  } catch {
    return null;
  }
}

function onKey(event) {
  const isTyping = event.target.closest("input, select, textarea, [role=application], dialog");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = { "/": focusSearch, "?": showKeys, j: () => move(1), k: () => move(-1), n: () => follow("[data-older]"), t: () => follow("[data-tokens]") }[event.key];
  if (act === undefined) return;
  event.preventDefault();
  act();
}

const focusSearch = () => document.querySelector(".find input").focus();
const showKeys = () => document.querySelector("#keys").showModal();
const follow = (selector) => document.querySelector(selector)?.click();

/** Focus the next or previous row; in a run this shows its call. */
function move(step) {
  const rows = [...main.querySelectorAll("[data-row]")];
  if (rows.length === 0) return;
  const here = rows.findIndex((row) => row === document.activeElement || row.getAttribute("aria-current") === "true");
  const next = rows[Math.min(Math.max(here < 0 ? 0 : here + step, 0), rows.length - 1)];
  next.focus();
  if (next.dataset.call) next.click();
}
