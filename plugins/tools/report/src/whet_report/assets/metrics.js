// All metrics, grouped by what stands before the first slash.

let smoothing = 0.6;
let logScale = false;
let wanted = "";

const FIRST = ["evaluation", "validation", "reward", "training", "logprob_gap", "response_length"];
const LAST = ["seconds"];

function groupOf(name) {
  return name.includes("/") ? name.split("/")[0] : "training";
}

function rank(group) {
  if (FIRST.includes(group)) return [0, FIRST.indexOf(group), group];
  return [LAST.includes(group) ? 2 : 1, 0, group];
}

function metricsView() {
  const body = el("div", { id: "curves" });
  const count = el("span", { class: "quiet" });
  const draw = () => {
    const { groups, shown } = grouped();
    count.textContent = `${shown} of ${Object.keys(data.curves).length} metrics`;
    body.replaceChildren(...(shown ? groups : [el("p", { class: "note" }, "No metric has this in its name.")]));
  };
  const search = el("input", { type: "search", placeholder: "Search metrics", value: wanted, "aria-label": "Search metrics",
    oninput: (event) => { wanted = event.target.value; draw(); } });
  const range = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: smoothing, "aria-label": "Smoothing",
    oninput: (event) => { smoothing = Number(event.target.value); draw(); } });
  const box = el("input", { type: "checkbox", checked: logScale, onchange: (event) => { logScale = event.target.checked; draw(); } });
  draw();
  return [el("div", { class: "bar" }, search, el("label", null, "Smoothing", range), el("label", null, box, "Log scale"), count), body];
}

function grouped() {
  const found = names((name) => name.toLowerCase().includes(wanted.toLowerCase()) && !/^evaluation\/.*\/ci_(low|high)$/.test(name));
  const groups = new Map();
  for (const name of found) groups.set(groupOf(name), [...(groups.get(groupOf(name)) || []), name]);
  const order = [...groups.keys()].sort((a, b) => {
    const [x, y] = [rank(a), rank(b)];
    return x[0] - y[0] || x[1] - y[1] || (x[2] < y[2] ? -1 : 1);
  });
  const made = order.map((group) => {
    const open = wanted !== "" || (!LAST.includes(group) && order.indexOf(group) < 12);
    const grid = el("div", { class: "grid" });
    const details = el("details", { open }, el("summary", null, visible(group), el("span", { class: "quiet" }, String(groups.get(group).length))), grid);
    const [still, moving] = [true, false].map((kind) => groups.get(group).filter((name) => constant(name) === kind));
    const charts = () => grid.childElementCount || grid.append(...moving.map((name) => metricChart(name)), ...(still.length ? [stillPanel(still)] : []));
    details.addEventListener("toggle", () => details.open && charts());
    if (open) charts();
    return details;
  });
  return { groups: made, shown: found.length };
}

// Metrics that never changed: their one value says it all.
function stillPanel(still) {
  return el("details", { class: "panel still", open: wanted !== "" }, el("summary", null, "Never changed", el("span", { class: "quiet" }, String(still.length))),
    el("dl", { class: "facts" }, still.flatMap((name) => [el("dt", null, visible(name)), el("dd", null, format(curveOf(name).y[0]))])));
}

function metricChart(name) {
  const sparse = /^(evaluation|validation)\//.test(name);
  const line = sparse ? evaluationLine(name, colourOf(1)) : { name, colour: colourOf(0), curve: curveOf(name) };
  return lineChart({ title: name, lines: [line], log: logScale, smooth: smoothing });
}
