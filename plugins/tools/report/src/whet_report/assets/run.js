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
