// Where sampler and trainer disagree about the very same tokens: the worst first.

function gapsView() {
  const { gaps } = data;
  if (!gaps.steps.length) {
    const curve = curveOf("logprob_gap/max");
    return [el("p", { class: "note" }, "No token of this run was recorded with both logprobs. Runs do so by themselves (rollout.record in the config), on the first step and on every tenth."),
      curve && el("div", { class: "grid" }, lineChart({ title: "logprob_gap/max (log scale)", log: true, height: 230, lines: [{ name: "logprob_gap/max", colour: colourOf(0), curve }] }))];
  }
  const steps = gaps.steps.map((each) => each.step);
  const line = (name, colour) => ({ name, colour, dots: true, curve: { x: steps, y: gaps.steps.map((each) => Math.min(each[name], 1e9)) } });
  return [
    el("p", { class: "note" }, "Sampler and trainer hold the same weights and should give each token the same logprob. What is left is rounding: about 1e−5 nats in float32, about 0.01 in bfloat16. More, or growth over steps, means that the two do not compute the same model. With stale rollouts the gap also holds what was learned meanwhile."),
    el("div", { class: "panels" },
      lineChart({ title: "gap on recorded tokens, in nats (log scale)", log: true, height: 300, lines: [line("max", colourOf(3)), line("p99", colourOf(1)), line("mean", colourOf(0)), line("median", colourOf(2))] }),
      dots()),
    el("h2", null, "Widest gaps"),
    el("div", { class: "panel" }, worstTable()),
  ];
}

// Samples of a group begin alike, and so do their gaps: what is the same in all but the sample is one row.
function merged() {
  const rows = new Map();
  for (const found of data.gaps.worst) {
    const [s, e, q, t] = found.at;
    const one = data.training.sources[s].episodes[e], sequence = one.sequences[q];
    const key = JSON.stringify([s, one.environment, one.group, t, sequence.tokens[t], found.gap, sequence.sampler_logprobs[t], sequence.trainer_logprobs[t], sequence.versions[t]]);
    if (rows.has(key)) rows.get(key).samples.push(one.sample);
    else rows.set(key, { ...found, samples: [one.sample] });
  }
  return [...rows.values()];
}

const WORST_HEADS = ["gap", "sampler", "trainer", "step", "versions behind", "environment", "group · sample", "position", "token in its place"];

function worstTable() {
  const rows = merged().map((found, i) => {
    const [s, e, q, t] = found.at;
    const source = data.training.sources[s], one = source.episodes[e], sequence = one.sequences[q];
    const around = (from, to) => visible(shorten(sequence.pieces.slice(Math.max(0, from), to).join("").replaceAll("\n", "↵"), 80));
    const open = () => {
      Object.assign(browse, { kind: "training", source: s, episode: e, sequence: q, token: t, tab: "tokens", mode: "gap", environment: "", text: "", from: "", to: "" });
      location.hash = "rollouts";
    };
    const samples = [...new Set(found.samples)].join(", ") + (found.samples.length > 1 ? ` (${found.samples.length} alike)` : "");
    const cells = [["n", gapText(found.gap)], ["n", exact(sequence.sampler_logprobs[t])], ["n", exact(sequence.trainer_logprobs[t])],
      ["n", format(source.step)], ["n", String(source.step - 1 - sequence.versions[t])], ["", visible(one.environment)],
      ["n", `${one.group} · ${samples}`], ["n", String(t)],
      ["mono", [around(t - 8, t), el("span", { class: "found" }, tokenText(sequence.pieces[t])), around(t + 1, t + 6)]]];
    return el("tr", { class: "link", tabindex: 0, "data-worst": i, onclick: open, onkeydown: (event) => event.key === "Enter" && open() },
      cells.map(([kind, content], c) => el("td", { class: kind, "data-label": WORST_HEADS[c] }, content)));
  });
  return el("table", { class: "rows", id: "worst" }, el("thead", null, el("tr", null, WORST_HEADS.map((text, i) => el("th", { class: i < 5 || (i > 5 && i < 8) ? "n" : "" }, text)))), el("tbody", null, rows));
}

function dots() {
  const height = 300;
  const box = svg("svg", { role: "img", "aria-label": "probabilities by sampler and trainer", height });
  const draw = () => {
    const width = box.clientWidth;
    if (width < 80) return;
    box.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const px = (share) => MARGIN.left + share * (width - MARGIN.left - MARGIN.right);
    const py = (share) => height - MARGIN.bottom - 12 - share * (height - MARGIN.top - MARGIN.bottom - 12);
    const parts = [0, 0.25, 0.5, 0.75, 1].flatMap((tick) => [
      svg("line", { class: "axis", x1: px(0), x2: px(1), y1: py(tick), y2: py(tick) }),
      svg("text", { x: px(0) - 8, y: py(tick) + 4, "text-anchor": "end" }, String(tick)),
      svg("text", { x: px(tick), y: height - 20, "text-anchor": "middle" }, String(tick))]);
    parts.push(svg("line", { class: "cursor", x1: px(0), y1: py(0), x2: px(1), y2: py(1) }),
      svg("text", { x: px(0.5), y: height - 4, "text-anchor": "middle" }, "probability by the sampler; upwards by the trainer"));
    for (const [sampler, trainer] of data.gaps.dots) {
      parts.push(svg("circle", { cx: px(Math.exp(sampler)).toFixed(1), cy: py(Math.exp(trainer)).toFixed(1), r: 2.2, fill: "var(--c0)", opacity: 0.4 }));
    }
    box.replaceChildren(...parts);
  };
  new ResizeObserver(draw).observe(box);
  return el("figure", { class: "chart", "data-chart": "dots" }, el("div", { class: "title" }, el("b", null, "probability of each token, sampler against trainer"),
    el("span", null, `${format(data.gaps.dots.length)} tokens`)), box);
}
