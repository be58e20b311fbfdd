// The values of all lines of a panel at the step under the pointer.

const curves = document.querySelector("#curves");

curves.addEventListener("pointermove", (event) => {
  const figure = event.target.closest(".panel");
  const drawing = figure?.querySelector("svg");
  if (!drawing) return;
  const box = drawing.getBoundingClientRect();
  const lines = [...drawing.querySelectorAll("path")].map(read);
  const first = Math.min(...lines.map((line) => line.steps[0]));
  const last = Math.max(...lines.map((line) => line.steps.at(-1)));
  const step = Math.round(first + ((event.clientX - box.left) / box.width) * (last - first));
  const shown = lines.map(({ label, steps, values }) => `${label} ${values[nearest(steps, step)]}`);
  figure.querySelector("output").textContent = `step ${Math.min(Math.max(step, first), last)}: ${shown.join(", ")}`;
});

curves.addEventListener("pointerout", (event) => {
  const figure = event.target.closest(".panel");
  if (figure && !figure.contains(event.relatedTarget)) figure.querySelector("output").textContent = "";
});

function read(path) {
  const numbers = (text) => text.split(" ").map(Number);
  const values = numbers(path.dataset.values).map((value) => Number(value.toPrecision(4)));
  return { label: path.dataset.label, steps: numbers(path.dataset.steps), values };
}

/** Return the index of the step that is nearest. */
function nearest(steps, step) {
  let best = 0;
  for (let index = 1; index < steps.length; index++) {
    if (Math.abs(steps[index] - step) < Math.abs(steps[best] - step)) best = index;
  }
  return best;
}
