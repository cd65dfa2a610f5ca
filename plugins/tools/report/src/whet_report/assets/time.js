// Where the time went: the phases of each step stacked, and every span of one step on a line of its own.

let detailed = null;

const PHASES = [...new Set([...data.time.phases, ...data.time.details.flatMap((detail) => detail.spans.map(([role, phase]) => `${role}.${phase}`))])]
  .filter((name) => name !== "other");

function phaseColour(name) {
  const index = PHASES.indexOf(name);
  return index < 0 || index >= PALETTE.length ? REST : PALETTE[index];
}

function timeView() {
  const { time } = data;
  if (!time.bars.length) return [el("p", { class: "note" }, "No step has been finished yet.")];
  const steps = time.details.map((detail) => detail.step);
  if (!steps.includes(detailed)) detailed = steps[Math.min(steps.length - 1, 2)];
  const span = el("section", { class: "panel", id: "timeline" });
  const show = (step) => {
    detailed = steps[nearest(steps, step)];
    span.replaceChildren(...timeline(steps, show).filter(Boolean));
  };
  show(detailed);
  const total = time.totals.reduce((a, b) => a + b, 0) || 1;
  return [
    el("section", { class: "panel" }, el("h2", null, "Seconds of each step, by phase"),
      el("p", { class: "note" }, "Each instant is counted once: for the driver's innermost phase, else for the generator, which may work beside it. Click a bar to see its spans below."),
      el("div", { class: "keys" }, time.phases.map((name) => swatch(phaseColour(name), name))), stacked(show)),
    span,
    el("section", { class: "panel" }, el("h2", null, "Over the whole run"), el("table", { class: "rows narrow" },
      el("thead", null, el("tr", null, ["phase", "time", "share"].map((text, i) => el("th", { class: i && "n" }, text)))),
      el("tbody", null, time.phases.map((name, i) => el("tr", null, el("td", null, swatch(phaseColour(name), name)),
        el("td", { class: "n" }, duration(time.totals[i])), el("td", { class: "n" }, `${((100 * time.totals[i]) / total).toFixed(1)} %`)))))),
  ];
}

function stacked(show) {
  const { bars, phases } = data.time;
  const height = 250;
  const box = svg("svg", { role: "img", "aria-label": "seconds of each step", height });
  const sums = bars.map((bar) => bar.seconds.reduce((a, b) => a + b, 0));
  const sorted = [...sums].sort((a, b) => a - b);
  const usual = sorted[Math.floor(0.9 * (sorted.length - 1))];
  const clipped = sorted[sorted.length - 1] > 2.5 * usual;
  const top = (clipped ? usual * 1.5 : sorted[sorted.length - 1]) * 1.05 || 1;
  const draw = () => {
    const width = box.clientWidth;
    if (width < 80) return;
    box.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const py = (value) => height - MARGIN.bottom - (Math.min(value, top) / top) * (height - MARGIN.top - MARGIN.bottom);
    const each = (width - MARGIN.left - MARGIN.right) / bars.length;
    const parts = niceTicks(0, top, 4).flatMap((tick) => [
      svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: py(tick), y2: py(tick) }),
      svg("text", { x: MARGIN.left - 8, y: py(tick) + 4, "text-anchor": "end" }, `${format(tick)} s`)]);
    const label = Math.ceil(bars.length / Math.max(1, width / 80));
    bars.forEach((bar, i) => {
      const x = MARGIN.left + i * each;
      let sum = 0;
      phases.forEach((name, p) => {
        if (!bar.seconds[p]) return;
        const [low, high] = [py(sum), py(sum + bar.seconds[p])];
        sum += bar.seconds[p];
        parts.push(svg("rect", { x: x + each * 0.08, y: high, width: Math.max(0.5, Math.min(each * 0.84, 44)), height: Math.max(0, low - high), fill: phaseColour(name) }));
      });
      if (sums[i] > top) parts.push(svg("text", { x: x + Math.min(each * 0.84, 44) / 2, y: MARGIN.top, "text-anchor": "middle" }, "▲"));
      if (i % label === 0) parts.push(svg("text", { x: x + Math.min(each, 44) / 2, y: height - 6, "text-anchor": "middle" }, format(bar.steps[0])));
      const hit = svg("rect", { class: "bar-hit", x, y: MARGIN.top, width: each, height: height - MARGIN.top - MARGIN.bottom, fill: "transparent",
        onclick: () => show(bar.steps[0]), onpointerleave: hideTip });
      hit.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY,
        bar.steps[0] === bar.steps[1] ? `step ${format(bar.steps[0])}` : `mean of steps ${format(bar.steps[0])} to ${format(bar.steps[1])}`,
        [...phases.map((name, p) => bar.seconds[p] && [swatch(phaseColour(name), name), duration(bar.seconds[p])]).filter(Boolean),
          ["together", duration(sums[i])]]));
      parts.push(hit);
    });
    box.replaceChildren(...parts);
  };
  new ResizeObserver(draw).observe(box);
  return el("div", { class: "plain" }, box, clipped && el("p", { class: "note small" }, "▲ reaches beyond the chart; its numbers are under the pointer."));
}

function timeline(steps, show) {
  const detail = data.time.details.find((found) => found.step === detailed);
  const lanes = [...new Set(detail.spans.map(([role, phase]) => `${role}.${phase}`))];
  const row = 24, left = 150, height = lanes.length * row + 30;
  const box = svg("svg", { role: "img", "aria-label": `spans of step ${detail.step}`, height });
  const draw = () => {
    const width = box.clientWidth;
    if (width < left + 80) return;
    box.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const px = (seconds) => left + (Math.max(0, Math.min(seconds, detail.seconds)) / (detail.seconds || 1)) * (width - left - 14);
    const parts = niceTicks(0, detail.seconds, 6).flatMap((tick) => [
      svg("line", { class: "axis", x1: px(tick), x2: px(tick), y1: 0, y2: height - 24 }),
      svg("text", { x: px(tick), y: height - 6, "text-anchor": "middle" }, duration(tick))]);
    lanes.forEach((lane, i) => parts.push(svg("text", { x: left - 10, y: i * row + 16, "text-anchor": "end" }, lane)));
    for (const [role, phase, begin, seconds] of detail.spans) {
      const name = `${role}.${phase}`;
      const bar = svg("rect", { x: px(begin), y: lanes.indexOf(name) * row + 3, rx: 3, height: row - 6, fill: phaseColour(name),
        width: Math.max(2, px(begin + seconds) - px(begin)), onpointerleave: hideTip });
      bar.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, name,
        [["from", duration(Math.max(0, begin))], ["for", duration(seconds)]]));
      parts.push(bar);
    }
    box.replaceChildren(...parts);
  };
  new ResizeObserver(draw).observe(box);
  return [el("h2", null, `Spans of step ${format(detail.step)}, ${duration(detail.seconds)}`),
    el("div", { class: "bar" }, el("div", { class: "chips" }, steps.map((step) =>
      el("button", { "aria-pressed": String(step === detail.step), onclick: () => show(step) }, format(step))))),
    detail.spans.length ? el("div", { class: "plain" }, box) : el("p", { class: "note" }, "Nothing was timed in this step."),
    detail.left_out > 0 && el("p", { class: "note small" }, `${format(detail.left_out)} shorter spans are left out.`)];
}
