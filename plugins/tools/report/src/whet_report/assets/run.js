// What ran, on what, and what happened: journal, config, plan, versions, and the end of each worker's log.

const BAD = ["failed", "lost", "rewound"];

function runView() {
  const lines = data.config.split("\n");
  const versions = Object.entries(data.versions || {});
  return [
    el("section", { class: "panel", id: "journal" }, el("h2", null, "Journal"),
      el("p", { class: "note small" }, "All events but finished steps, the newest first."),
      data.journal.length ? el("div", { class: "scroll" }, el("table", { class: "rows" }, el("tbody", null, [...data.journal].reverse().map(eventRow)))) : el("p", { class: "note" }, "There is none.")),
    el("div", { class: "panels" },
      el("section", { class: "panel" }, el("h2", null, "Plan"), planView()),
      el("section", { class: "panel" }, el("h2", null, "Versions"), el("dl", { class: "facts scroll" }, versions.flatMap(([name, value]) => [el("dt", null, visible(name)), el("dd", null, visible(String(value)))])))),
    data.memory.length > 0 && el("section", { class: "panel" }, el("h2", null, "Memory"), memoryView()),
    el("section", { class: "panel" }, el("h2", null, "Config"), el("pre", { id: "config", class: lines.length > 40 && "long" }, lines.map(configLine))),
    data.logs.map((log) => el("details", { class: "panel" }, el("summary", null, visible(log.name), el("span", { class: "quiet" }, log.text ? "its end" : "empty")), el("pre", null, visible(log.text)))),
  ];
}

function eventRow(found) {
  const bad = BAD.some((word) => found.event.includes(word));
  const name = el("td", null, bad ? el("span", { class: "pill failed" }, visible(found.event)) : visible(found.event));
  return el("tr", null, el("td", { class: "quiet small" }, moment(found.time)), name,
    el("td", null, Object.entries(found.details).map(([key, value]) => el("div", null, el("span", { class: "quiet" }, visible(key), " "), visible(value)))));
}

function configLine(line) {
  const found = /^(\s*(?:- )?)([\w-]+)(:.*)$/.exec(line);
  return found ? [found[1], el("span", { class: "k" }, found[2]), ...visible(found[3]), "\n"] : [...visible(line), "\n"];
}

function planView() {
  const plan = data.plan || {};
  const roles = Array.isArray(plan.roles) ? plan.roles : [];
  const facts = Object.entries(plan).filter(([name, value]) => name !== "roles" && typeof value !== "object");
  const cell = (value) => visible(Array.isArray(value) ? value.join(", ") : String(value ?? "–"));
  return [
    el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", null, visible(name)), el("dd", null, cell(value))])),
    roles.length > 0 && el("div", { class: "scroll", id: "plan" }, el("table", { class: "rows" }, el("thead", null, el("tr", null, ["role", "component", "ranks", "threads", "devices", "processes"].map((text) => el("th", null, text)))),
      el("tbody", null, roles.map((role) => el("tr", null, ["role", "component", "ranks", "threads", "devices", "processes"].map((key) => el("td", null, cell(role[key])))))))),
  ];
}

// The most memory of a rank in each phase, measured and predicted. Bars have one scale; a line marks the prediction.
function memoryView() {
  const largest = Math.max(...data.memory.flatMap((one) => [one.measured, one.predicted || 0]), 1);
  const rows = data.memory.map((one) => {
    const known = one.predicted !== null;
    const off = known ? (one.measured / one.predicted - 1) * 100 : null;
    const bar = svg("svg", { class: "peak", role: "img", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-label": `${one.role}.${one.phase}` },
      svg("rect", { x: 0, y: 2, width: (one.measured / largest) * 100, height: 6, fill: colourOf(0) }),
      known && svg("rect", { class: "predicted", x: (one.predicted / largest) * 99.4, y: 0, width: 0.6, height: 10, fill: colourOf(1) }));
    return el("tr", null, el("td", null, visible(one.role)), el("td", null, one.phase), el("td", { class: "n" }, bytes(one.measured)),
      el("td", { class: "n" }, known ? bytes(one.predicted) : "–"), el("td", { class: "n" }, known && one.predicted > 0 ? `${off < 0 ? "−" : "+"}${Math.abs(off).toFixed(1)} %` : "–"),
      el("td", null, bar), el("td", { class: "quiet small" }, known ? visible(one.source) : "not predicted"));
  });
  const heads = [["role"], ["phase"], ["measured", "n"], ["predicted", "n"], ["difference", "n"], [""], ["by"]];
  return [
    el("p", { class: "note small" }, "The peak of each phase, the largest of all ranks and steps. ", swatch(colourOf(0), "measured"), " ", swatch(colourOf(1), "predicted")),
    el("div", { class: "scroll" }, el("table", { class: "rows", id: "memory" }, el("thead", null, el("tr", null, heads.map(([text, kind]) => el("th", { class: kind }, text)))), el("tbody", null, rows))),
  ];
}

function bytes(size) {
  return size < 2 ** 30 ? `${format(Math.round(size / 2 ** 20))} MiB` : `${(size / 2 ** 30).toFixed(1)} GiB`;
}
