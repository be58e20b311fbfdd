// What all pages share: live updates, keys, local times.

const main = document.querySelector("main");
const live = document.querySelector("#live");
const QUIET_MS = 700; // between two updates, however many events come
const sent = new WeakMap(); // live part -> its content as the server sent it last
let waiting = null; // timer of the next update

showTimes(document);
document.addEventListener("keydown", onKey);
document.querySelector("#keys-button").addEventListener("click", () => document.querySelector("#keys").showModal());
if ("events" in document.body.dataset) whileVisible(followEvents);
if (document.body.dataset.poll) whileVisible(() => every(Number(document.body.dataset.poll) * 1000, update));
for (const part of document.querySelectorAll("[data-part]")) {
  if ("once" in part.dataset) fill(part); else whileVisible(() => every(2000, () => fill(part)));
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

/** Run `start` while the page is visible; it returns the function that stops it. Hidden pages cost the server nothing. */
function whileVisible(start) {
  let stop = document.hidden ? null : start();
  document.addEventListener("visibilitychange", () => {
    stop?.();
    stop = document.hidden ? null : start();
  });
}

function every(milliseconds, work) {
  work();
  const timer = setInterval(work, milliseconds);
  return () => clearInterval(timer);
}

function followEvents() {
  const events = new EventSource("/view/events");
  events.onopen = () => { live.textContent = "live"; live.classList.add("on"); };
  events.onerror = () => { live.textContent = "reconnecting"; live.classList.remove("on"); };
  for (const kind of ["stage", "group", "job", "feed"]) events.addEventListener(kind, soon);
  return () => events.close();
}

function soon() {
  waiting ??= setTimeout(() => { waiting = null; update(); }, QUIET_MS);
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
