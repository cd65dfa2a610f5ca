// One task: the samples of its group side by side, and how its rollouts changed over the run.

const EXCERPT = 240;

function sameTask(a, b) {
  return a.environment === b.environment && a.task === b.task;
}

function lastWords(one) {
  return one.messages.length ? one.messages[one.messages.length - 1].content : "";
}

// Recorded for each episode; older run folders hold it only in what was recorded token by token.
function advantageOf(one) {
  if (one.advantage !== null && one.advantage !== undefined) return one.advantage;
  const column = one.sequences.length ? one.sequences[0].columns.advantages : undefined;
  return typeof column === "number" ? column : null;
}

function groupView(one, source, draw) {
  const members = source.episodes.filter((each) => each.group === one.group && sameTask(each, one));
  if (one.group === null || members.length < 2) return null;
  const most = members.reduce((best, each) => Math.max(best, Math.abs(advantageOf(each) || 0)), 0) || 1;
  const cards = members.map((each) => {
    const advantage = advantageOf(each);
    return el("button", { class: "sample", "aria-pressed": String(each === one), "data-sample": each.sample,
      onclick: () => { Object.assign(browse, { episode: source.episodes.indexOf(each), sequence: 0, token: null }); draw(); } },
    el("span", { class: "line" }, el("b", null, format(each.reward)), `sample ${format(each.sample)}`,
      el("span", { class: "end" }, `${format(each.response_length)} tokens${each.stop === "length" ? ", cut" : ""}`)),
    advantage !== null && el("span", { class: "advantage", paint: diverging(most, []).paint(advantage) }, `advantage ${format(advantage)}`),
    el("span", { class: "said" }, visible(shorten(lastWords(each), EXCERPT))));
  });
  const missing = source.total > source.episodes.length ? " Samples that are not on this page are missing." : "";
  return el("section", { class: "panel", id: "group" }, el("h2", null, source.kind === "training" ? `Group ${format(one.group)}, its samples side by side` : "Samples of this task"),
    missing && el("p", { class: "note small" }, missing), el("div", { class: "samples" }, cards));
}

// The rollouts of a task at every step of this kind that the page holds.
function historyOf(one) {
  return sourcesOf(browse.kind).map((source, index) => ({ source, index, found: source.episodes.filter((each) => sameTask(each, one)) }))
    .filter(({ found }) => found.length && one.task !== null);
}

function historyView(one, source, draw) {
  const steps = historyOf(one);
  const heading = el("h2", null, "This task over the run");
  if (steps.length < 2) {
    return el("section", { class: "panel", id: "history" }, heading, el("p", { class: "note small" },
      `Of the ${browse.kind === "training" ? "steps" : "evaluations"} on this page no other one has rollouts of this task.`));
  }
  const mean = (values) => { const fine = values.filter((value) => value !== null); return fine.length ? fine.reduce((a, b) => a + b, 0) / fine.length : null; };
  const rows = steps.map(({ source: each, index, found }) => ({ index, step: each.step, here: each === source, found,
    reward: mean(found.map((e) => e.reward)), length: mean(found.map((e) => e.response_length)) }));
  const known = rows.filter((row) => row.reward !== null);
  const open = (row) => () => { pickSource(row.index); browse.episode = sourcesOf(browse.kind)[row.index].episodes.indexOf(row.found[0]); draw(); };
  return el("section", { class: "panel", id: "history" }, heading,
    known.length > 1 && lineChart({ title: "mean reward of its rollouts", height: 130, last: false,
      lines: [{ name: "mean reward", colour: colourOf(0), dots: true, curve: { x: known.map((row) => row.step), y: known.map((row) => row.reward) } }] }),
    el("div", { class: "scroll" }, el("table", { class: "rows" },
      el("thead", null, el("tr", null, ["step", "rewards", "tokens", "first sample's last words"].map((text, i) => el("th", { class: i === 0 || i === 2 ? "n" : "" }, text)))),
      el("tbody", null, rows.map((row) => el("tr", { class: "link", tabindex: 0, "aria-current": row.here && "step", onclick: open(row), onkeydown: (event) => event.key === "Enter" && open(row)() },
        el("td", { class: "n" }, format(row.step)), el("td", { class: "rewards" }, row.found.slice(0, 16).map((e) => format(e.reward)).join(" ") + (row.found.length > 16 ? " …" : "")),
        el("td", { class: "n" }, row.length === null ? "–" : format(Math.round(row.length))), el("td", { class: "mono" }, visible(shorten(lastWords(row.found[0]).replaceAll("\n", " "), 100)))))))));
}

function goldView(one) {
  return one.gold && el("div", { class: "message gold" }, el("div", { class: "role" }, "right answer, from the task's data; the model never saw it"),
    el("pre", null, visible(one.gold)));
}
