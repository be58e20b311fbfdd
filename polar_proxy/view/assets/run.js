// A run: choose a call in the tree without loading the whole page again.

import { get, showTimes } from "/view/assets/page.js";

const pane = document.querySelector("#call");
const tree = document.querySelector("#tree");
let chosen = null;

tree.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-call]");
  if (link === null || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  choose(link.dataset.call, true);
});
addEventListener("popstate", () => {
  const call = new URLSearchParams(location.search).get("call");
  if (call !== null) choose(call, false);
});
tree.addEventListener("replaced", mark);

async function choose(call, remember) {
  chosen = call;
  mark();
  const content = await get(`/view/parts/calls/${encodeURIComponent(call)}`);
  if (content === null) {
    location.search = new URLSearchParams({ call });
    return;
  }
  if (chosen !== call) return; // another call was chosen meanwhile
  pane.replaceChildren(...new DOMParser().parseFromString(content, "text/html").body.childNodes);
  showTimes(pane);
  pane.scrollTop = 0;
  if (remember) history.pushState(null, "", `?call=${encodeURIComponent(call)}`);
}

function mark() {
  if (chosen === null) return;
  for (const link of tree.querySelectorAll("a[data-call]")) {
    if (link.dataset.call === chosen) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}
