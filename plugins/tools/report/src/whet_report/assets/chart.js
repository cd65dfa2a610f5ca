// Charts as SVG: axes with round numbers, lines with a band, dots with intervals, and a cursor that reads values.

function niceTicks(from, to, count) {
  if (!(to > from)) return [from];
  const rough = (to - from) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i += 1) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function logTicks(from, to, count) {
  const first = Math.ceil(from - 1e-9), last = Math.floor(to + 1e-9);
  if (last - first < 2) {
    const powers = Array.from({ length: 4 }, (_, i) => Math.floor(from) + i);
    const ticks = powers.flatMap((power) => [1, 2, 5].map((m) => power + Math.log10(m))).filter((v) => v >= from && v <= to);
    // Within less than a decade there may be none of these, or one, which says nothing of the scale.
    return ticks.length >= 2 ? ticks : niceTicks(10 ** from, 10 ** to, count - 1).filter((v) => v > 0).map((v) => Math.log10(v));
  }
  const every = Math.ceil((last - first + 1) / count);
  const ticks = [];
  for (let power = first; power <= last; power += every) ticks.push(power);
  return ticks;
}

// An exponential mean that counts its own start: the first points are not drawn towards 0.
function smoothed(values, strength) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    sum = sum * strength + value * (1 - strength);
    weight = weight * strength + (1 - strength);
    return sum / weight;
  });
}

// A curve that runs smoothly by itself, such as a schedule, is only distorted by smoothing.
function wobbles(values) {
  let turns = 0;
  for (let i = 2; i < values.length; i += 1) turns += (values[i] - values[i - 1]) * (values[i - 1] - values[i - 2]) < 0;
  return turns > values.length / 10;
}

// The first and the last value. The points of a long curve are means of many steps.
function ends(curve) {
  return curve.ends ?? [curve.y[0], curve.y[curve.y.length - 1]];
}

// Pixels between dots; where they are closer, dots and intervals are drawn as a line with a band.
const CLOSEST = 7;
const MARGIN = { left: 52, right: 12, top: 10, bottom: 24 };

// lines: [{name, colour, curve: {x, y, low?, high?}, dots?, ci?}]; ci: {low, high} of intervals, which are cut at 0 where
// no value is below it: a length has no use for what is left of the interval there.
function lineChart({ title, lines, height = 190, log = false, smooth = 0, steps = "step", last = true, rule = null }) {
  const lost = lines.reduce((sum, line) => sum + (line.curve.lost || 0), 0);
  const drawn = lines.filter((line) => line.curve.x.length);
  const end = drawn.length === 1 && last ? format(ends(drawn[0].curve)[1]) : "";
  const box = svg("svg", { role: "img", "aria-label": title });
  const node = el("figure", { class: "chart", "data-chart": title },
    el("div", { class: "title" }, el("b", null, visible(title)),
      el("span", null, lost ? `${lost} not finite  ` : "", end && `last ${end}`)),
    lines.length > 1 && el("div", { class: "keys" }, lines.map((line) => swatch(line.colour, line.name))), box);
  box.setAttribute("height", height);
  box.style.height = `${height}px`;
  let width = 0;
  const draw = () => {
    width = box.clientWidth;
    if (width > 80) drawLines(box, width, height, drawn, log, smooth, steps, rule);
  };
  new ResizeObserver(() => box.clientWidth !== width && draw()).observe(box);
  return whenSeen(node, draw);
}

function drawLines(box, width, height, lines, log, smooth, steps, rule) {
  box.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const usable = (value) => !log || value > 0;
  const raise = (value) => (log ? Math.log10(value) : value);
  const shown = lines.map((line) => {
    const { x, y, low, high } = line.curve;
    const kept = x.map((_, i) => i).filter((i) => usable(y[i]));
    const pick = (values) => values && kept.map((i) => raise(usable(values[i]) ? values[i] : y[i]));
    const ci = line.ci && { low: pick(line.ci.low), high: pick(line.ci.high) };
    return { ...line, x: kept.map((i) => x[i]), y: pick(y), low: pick(low), high: pick(high), ci };
  }).filter((line) => line.x.length);
  if (!shown.length) {
    box.replaceChildren(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" },
      log ? "nothing above 0 to show on this scale" : "no finite values"));
    return;
  }
  const xs = shown.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
  let [left, right] = [Math.min(...xs), Math.max(...xs)];
  if (left === right) [left, right] = [Math.max(0, left - 1), right + 1];
  let bottom = Infinity, top = -Infinity;
  for (const line of shown) {
    const floor = log || Math.min(...(line.low || line.y)) < 0 ? -Infinity : 0;
    if (line.ci) line.ci.low = line.ci.low.map((value) => Math.max(floor, value));
  }
  for (const line of shown) {
    for (let i = 0; i < line.x.length; i += 1) {
      bottom = Math.min(bottom, (line.low || (line.ci ? line.ci.low : line.y))[i]);
      top = Math.max(top, (line.high || (line.ci ? line.ci.high : line.y))[i]);
    }
  }
  if (bottom === top && bottom === 0) top = 1;
  if (bottom === top) [bottom, top] = [bottom - (Math.abs(bottom) * 0.1 || 1), top + (Math.abs(top) * 0.1 || 1)];
  const room = (top - bottom) * 0.06;
  if (!log && bottom >= 0 && bottom < (top - bottom) * 0.5) bottom = 0;
  else bottom -= room;
  top += room;
  const px = (value) => MARGIN.left + ((value - left) / (right - left)) * (width - MARGIN.left - MARGIN.right);
  const py = (value) => height - MARGIN.bottom - ((value - bottom) / (top - bottom)) * (height - MARGIN.top - MARGIN.bottom);

  const parts = [];
  for (const tick of log ? logTicks(bottom, top, 5) : niceTicks(bottom, top, 4)) {
    const label = log ? format(Number((10 ** tick).toPrecision(6))) : format(tick);
    parts.push(svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: py(tick), y2: py(tick) }),
      svg("text", { x: MARGIN.left - 8, y: py(tick) + 4, "text-anchor": "end" }, label));
  }
  for (const tick of niceTicks(left, right, Math.max(2, width / 75)).filter(Number.isInteger)) {
    parts.push(svg("text", { x: px(tick), y: height - 6, "text-anchor": "middle" }, format(tick)));
  }
  for (const line of shown) parts.push(...drawLine(line, px, py, log ? 0 : smooth, log));
  const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
  const area = svg("rect", { class: "area", x: MARGIN.left, y: 0, width: Math.max(1, width - MARGIN.left - MARGIN.right),
    height: height - MARGIN.bottom, fill: "transparent" });
  area.addEventListener("pointermove", (event) => {
    const at = left + ((event.clientX - box.getBoundingClientRect().left - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (right - left);
    readOut(event, lines, at, cursor, px, steps);
  });
  area.addEventListener("pointerleave", () => {
    hideTip();
    cursor.setAttribute("visibility", "hidden");
  });
  box.replaceChildren(...parts, cursor, area);
}

function drawLine(line, px, py, smooth, log) {
  const path = (values) => values.map((v, i) => `${i ? "L" : "M"}${px(line.x[i]).toFixed(1)} ${py(v).toFixed(1)}`).join("");
  const stroke = { stroke: line.colour, fill: "none", "stroke-width": 1.6, "stroke-linejoin": "round" };
  const parts = [];
  const band = (low, high) => {
    const back = line.x.map((x, i) => `L${px(x).toFixed(1)} ${py(low[i]).toFixed(1)}`).reverse().join("");
    parts.push(svg("path", { d: `${path(high)}${back}Z`, fill: line.colour, opacity: 0.16 }));
  };
  const dense = line.x.length > 1 && (px(line.x[line.x.length - 1]) - px(line.x[0])) / (line.x.length - 1) < CLOSEST;
  if (line.low) band(line.low, line.high);
  if (line.dots && dense) {
    if (line.ci) band(line.ci.low, line.ci.high);
    parts.push(svg("path", { d: path(line.y), ...stroke }));
  } else if (line.dots || line.x.length === 1) {
    line.x.forEach((x, i) => {
      if (line.ci) parts.push(svg("line", { x1: px(x), x2: px(x), y1: py(line.ci.low[i]), y2: py(line.ci.high[i]), stroke: line.colour, opacity: 0.5 }));
      parts.push(svg("circle", { cx: px(x), cy: py(line.y[i]), r: 3, fill: line.colour }));
    });
    parts.push(svg("path", { d: path(line.y), ...stroke, opacity: 0.6 }));
  } else if (smooth > 0 && line.x.length > 4 && wobbles(line.y)) {
    parts.push(svg("path", { d: path(line.y), ...stroke, "stroke-width": 1, opacity: 0.3 }),
      svg("path", { d: path(smoothed(line.y, smooth)), ...stroke, "stroke-width": 2 }));
  } else {
    parts.push(svg("path", { d: path(line.y), ...stroke }));
  }
  return parts;
}

function nearest(values, wanted) {
  let best = 0;
  for (let i = 1; i < values.length; i += 1) {
    if (Math.abs(values[i] - wanted) < Math.abs(values[best] - wanted)) best = i;
  }
  return best;
}

function readOut(event, lines, at, cursor, px, steps) {
  const first = lines.reduce((best, line) => {
    const step = line.curve.x[nearest(line.curve.x, at)];
    return best === null || Math.abs(step - at) < Math.abs(best - at) ? step : best;
  }, null);
  if (first === null) return;
  cursor.setAttribute("x1", px(first));
  cursor.setAttribute("x2", px(first));
  cursor.setAttribute("visibility", "visible");
  const rows = lines.map((line) => {
    const i = line.curve.x.indexOf(first);
    if (i < 0) return null;
    const ci = line.ci ? ` [${format(line.ci.low[i])}, ${format(line.ci.high[i])}]` : "";
    const range = line.curve.low ? ` (${format(line.curve.low[i])} to ${format(line.curve.high[i])})` : "";
    return [swatch(line.colour, line.name), `${format(line.curve.y[i])}${ci}${range}`];
  }).filter(Boolean);
  showTip(event.clientX, event.clientY, `${steps} ${format(first)}`, rows);
}
