// The first view: how the run stands, what deserves a look, and the few curves that tell most.

function curveOf(name) {
  return data.curves[name] || null;
}

function names(test) {
  return Object.keys(data.curves).filter(test);
}

function card(label, number, detail) {
  return el("div", { class: "card" }, el("div", { class: "label" }, label), el("div", { class: "number" }, number),
    el("div", { class: "detail" }, detail || "\u00a0"));
}

const LATE = [["reward/std", "Reward deviation", "within a group, last tenth; 0: nothing to learn"],
  ["response_length/cut", "Cut", "by their length limit, last tenth"]];
const KL = ["kl_reference/k3", "kl_reference/k1", "kl_reference/reward", "kl/reverse", "kl_old/k3"];

function klName() {
  return KL.find((name) => curveOf(name) && curveOf(name).y.length);
}

function meanOf(values) {
  return values.reduce((a, b) => a + b, 0) / values.length;
}

function fewOf(curve) {
  return Math.max(1, Math.round(curve.y.length / 10));
}

// Whether a metric had one value at all of several steps.
function constant(name) {
  const { y, lost } = curveOf(name);
  return y.length > 1 && !lost && y.every((value) => value === y[0]);
}

function overview() {
  const { run } = data;
  const cards = [
    card("Steps", `${format(run.done)}${run.steps ? ` / ${format(run.steps)}` : ""}`, STATES[run.state]),
    card("At work", duration(run.seconds), run.run_attempts > 1 ? `${run.run_attempts} run attempts` : `began ${moment(run.began)}`),
  ];
  for (const name of names((n) => /^evaluation\/.*\/reward$/.test(n))) {
    const [first, final] = ends(curveOf(name));
    const ci = intervalOf(name);
    cards.push(card(`Evaluation, ${name.split("/").slice(1, -1).join("/")}`, format(final),
      `from ${format(first)}${ci ? `, now [${format(ci.low[ci.low.length - 1])}, ${format(ci.high[ci.high.length - 1])}]` : ""}`));
  }
  for (const [name, label] of [["reward/mean", "Training reward"], ["validation/loss", "Validation loss"],
    ...(curveOf("reward/mean") ? [] : [["loss", "Loss"]])]) {
    const curve = curveOf(name);
    if (!curve || !curve.y.length) continue;
    const few = fewOf(curve);
    cards.push(card(label, format(meanOf(curve.y.slice(-few))), `last tenth; first: ${format(meanOf(curve.y.slice(0, few)))}`));
  }
  for (const [name, label, detail] of LATE) {
    const curve = curveOf(name);
    if (!curve || !curve.y.length) continue;
    const late = meanOf(curve.y.slice(-fewOf(curve)));
    cards.push(card(label, name.endsWith("/cut") ? `${format(Number((100 * late).toPrecision(3)))} %` : format(late), detail));
  }
  const kl = klName();
  if (kl) cards.push(card("KL", format(meanOf(curveOf(kl).y.slice(-fewOf(curveOf(kl))))), `${kl}, last tenth`));
  const gap = curveOf("logprob_gap/max");
  if (gap && gap.y.length) cards.push(card("Widest gap", format(Math.max(...(gap.high || gap.y))), "nats, sampler to trainer"));
  return [
    el("div", { class: "cards" }, cards),
    run.error && el("section", { class: "panel" }, el("h2", null, "How it ended"), el("pre", { class: "failure" }, visible(run.error))),
    el("section", { class: "panel" }, el("h2", null, "Worth a look"), findings()),
    el("div", { class: "grid" }, keyCharts()),
    el("section", { class: "panel" }, el("h2", null, "What ran"), el("dl", { class: "facts" }, run.facts.flatMap(([name, value]) =>
      [el("dt", null, name), el("dd", null, visible(value))]), el("dt", null, "folder"), el("dd", null, visible(run.folder)),
    el("dt", null, "page written"), el("dd", null, moment(run.written)))),
  ];
}

const STATES = { finished: "finished", failed: "failed", stopped: "ended early, can be resumed", unknown: "no journal",
  open: "under way, or killed" };

function findings() {
  if (!data.findings.length) return el("p", { class: "note" }, "Nothing stands out.");
  return el("ul", { class: "findings" }, data.findings.map((found) =>
    el("li", { class: found.level }, visible(found.text), " ", found.view && el("a", { href: `#${found.view}` }, "show"))));
}

function evaluationLines() {
  return names((n) => /^evaluation\/.*\/reward$/.test(n)).map((name, i) => evaluationLine(name, colourOf(i + 1)));
}

function evaluationLine(name, colour) {
  return { name, colour, curve: curveOf(name), dots: true, ci: intervalOf(name) };
}

// The 95 % interval of an evaluation's figure, where each of its points has one.
function intervalOf(name) {
  const [low, high] = [curveOf(`${name}/ci_low`), curveOf(`${name}/ci_high`)];
  const points = curveOf(name).x.length;
  return points && low && high && low.x.length === points && high.x.length === points ? { low: low.y, high: high.y } : null;
}

function keyCharts() {
  const made = [];
  const reward = curveOf("reward/mean");
  const lines = [...(reward ? [{ name: "training, reward/mean", colour: colourOf(0), curve: reward }] : []), ...evaluationLines()];
  if (lines.length) made.push(lineChart({ title: "reward", lines, smooth: smoothing, height: 230 }));
  const loss = ["loss", "validation/loss"].filter(curveOf);
  if (!reward && loss.length) {
    made.push(lineChart({ title: "loss", height: 230, smooth: smoothing, lines: loss.map((name, i) =>
      ({ name, colour: colourOf(i), curve: curveOf(name), dots: name.startsWith("validation") })) }));
  }
  const further = [["reward/std", false], [klName() || "", false], ["response_length/mean", false], ["response_length/cut", false],
    ["logprob_gap/max", true], ["entropy", false], ["grad_norm", false], ["lr", false], ["seconds/step", false]];
  for (const [name, log] of further) {
    if (curveOf(name) && made.length < 9 && !constant(name)) {
      made.push(lineChart({ title: log ? `${name} (log scale)` : name, log, smooth: smoothing, height: 230,
        lines: [{ name, colour: colourOf(0), curve: curveOf(name) }] }));
    }
  }
  return made;
}
