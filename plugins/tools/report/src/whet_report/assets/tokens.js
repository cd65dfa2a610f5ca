// One sequence token by token, each coloured by a number that somebody gave it.

const CHUNK = 3000;

function gapAt(sequence, i) {
  if (!sequence.loss_mask[i] || !sequence.sampler_logprobs.length || !sequence.trainer_logprobs.length) return null;
  const [sampler, trainer] = [sequence.sampler_logprobs[i], sequence.trainer_logprobs[i]];
  return sampler === null || trainer === null ? Infinity : Math.abs(trainer - sampler);
}

function columnAt(column, i) {
  return Array.isArray(column) ? column[i] : column;
}

function logprobScale() {
  const scale = sequential("var(--scale)", 0, 6, ["certain", "1 in 400 or rarer", ""]);
  return { ...scale, of: (logprob) => -logprob };
}

// What tokens can be coloured by in a sequence: name -> {label, scale, at(i)}.
function colourings(sequence) {
  const found = new Map();
  const lists = [["logprob", "sampler's logprob", sequence.sampler_logprobs], ["trainer", "trainer's logprob", sequence.trainer_logprobs]];
  const [first, second] = lists.map(([, label, values]) => ({ label, scale: logprobScale(), at: (i) => values[i] }));
  if (sequence.sampler_logprobs.length) found.set("logprob", first);
  if (sequence.trainer_logprobs.length) {
    found.set("trainer", second);
    if (sequence.sampler_logprobs.length) found.set("gap", { label: "gap, sampler to trainer", scale: gapScale(), at: (i) => gapAt(sequence, i) });
  }
  for (const [name, column] of Object.entries(sequence.columns)) {
    const values = (Array.isArray(column) ? column : [column]).filter((v) => v !== null);
    const most = values.reduce((best, v) => Math.max(best, Math.abs(v)), 0) || 1;
    const bound = name === "advantages" ? Math.max(2, most) : most;
    const signed = name === "advantages" || values.some((v) => v < 0);
    const ticks = signed ? [format(-bound), format(bound)] : ["0", format(bound)];
    const scale = signed ? diverging(bound, ticks) : sequential("var(--scale)", 0, bound, ticks);
    found.set(name, { label: name, scale, at: (i) => columnAt(column, i) });
  }
  const versions = [...new Set(sequence.versions.filter((v) => v !== null && v >= 0))].sort((a, b) => a - b);
  if (versions.length) {
    const [old, newest] = [versions[0], versions[versions.length - 1]];
    const scale = versions.length === 1
      ? { paint: () => tint("var(--c2)", 0.5), from: old, to: old, ticks: ["", `all by version ${old}`] }
      : { paint: (v) => tint("var(--c2)", 0.2 + (0.8 * (v - old)) / (newest - old)), from: old, to: newest, ticks: [`version ${old}`, `version ${newest}`] };
    found.set("version", { label: "weight version", scale, at: (i) => sequence.versions[i] });
  }
  found.set("mask", { label: "loss mask", at: (i) => sequence.loss_mask[i], all: true,
    scale: { paint: (v) => tint("var(--c0)", v ? 0.6 : 0), from: 0, to: 1, ticks: ["given", "trained on"] } });
  return found;
}

function paintOf(colouring, sequence, i) {
  if (!colouring.all && !sequence.loss_mask[i]) return "transparent";
  const value = colouring.at(i);
  if (value === null || value === undefined) return tint("var(--bad)", 1);
  return colouring.scale.paint(colouring.scale.of ? colouring.scale.of(value) : value);
}

function tokenText(piece) {
  if (piece === "") return [el("span", { class: "mark" }, "∅")];
  const parts = [];
  piece.split("\n").forEach((line, i) => {
    if (i) parts.push(el("span", { class: "mark" }, "↵"), "\n");
    parts.push(...visible(line.replaceAll("\t", "→\t")));
  });
  return parts;
}

function tokenRows(sequence, i) {
  const chance = (logprob) => (logprob === null ? "not finite" : `${exact(logprob)}  (${(100 * Math.exp(logprob)).toPrecision(3)} %)`);
  const rows = [["position", `${i}${i < sequence.prompt_length ? ", prompt" : ""}`], ["token id", String(sequence.tokens[i])],
    ["loss mask", sequence.loss_mask[i] ? "trained on" : "given"]];
  if (sequence.loss_mask[i]) {
    if (sequence.sampler_logprobs.length) rows.push(["sampler's logprob", chance(sequence.sampler_logprobs[i])]);
    if (sequence.trainer_logprobs.length) rows.push(["trainer's logprob", chance(sequence.trainer_logprobs[i])]);
    const gap = gapAt(sequence, i);
    if (gap !== null) rows.push(["gap", Number.isFinite(gap) ? `${format(gap)} nats` : "not finite"]);
    if (sequence.versions.length) rows.push(["weight version", String(sequence.versions[i])]);
    for (const [name, column] of Object.entries(sequence.columns)) rows.push([name, format(columnAt(column, i))]);
  }
  return rows;
}

function tokenView(sequence, mode, focus) {
  const colouring = colourings(sequence).get(mode);
  const body = el("div", { class: "tokens", tabindex: 0, "aria-label": "tokens; the arrow keys go from one to the next" });
  const nodes = [];
  const add = (count) => {
    const end = Math.min(sequence.tokens.length, nodes.length + count);
    for (let i = nodes.length; i < end; i += 1) {
      const node = el("span", { class: sequence.loss_mask[i] ? "t" : "t given", "data-i": i, paint: paintOf(colouring, sequence, i) }, tokenText(sequence.pieces[i]));
      nodes.push(node);
    }
    body.replaceChildren(...nodes);
    if (end < sequence.tokens.length) {
      body.append("\n", el("button", { onclick: () => add(CHUNK) }, `show more of the other ${format(sequence.tokens.length - end)} tokens`));
    }
  };
  let at = null;
  const point = (i) => {
    if (at !== null) nodes[at].classList.remove("at");
    at = i;
    nodes[i].classList.add("at");
    nodes[i].scrollIntoView({ block: "nearest" });
    const box = nodes[i].getBoundingClientRect();
    showTip(box.left, box.bottom - 8, visible(JSON.stringify(sequence.pieces[i])), tokenRows(sequence, i));
  };
  body.addEventListener("pointermove", (event) => {
    const node = event.target.closest(".t");
    if (!node) return hideTip();
    const i = Number(node.dataset.i);
    return showTip(event.clientX, event.clientY, visible(JSON.stringify(sequence.pieces[i])), tokenRows(sequence, i));
  });
  body.addEventListener("pointerleave", hideTip);
  body.addEventListener("blur", hideTip);
  body.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move || !nodes.length) return;
    event.preventDefault();
    point(at === null ? 0 : Math.max(0, Math.min(nodes.length - 1, at + move)));
  });
  add(Math.max(CHUNK, (focus || 0) + 200));
  if (focus !== null && focus !== undefined && nodes[focus]) {
    at = focus;
    nodes[focus].classList.add("at");
    requestAnimationFrame(() => nodes[focus].scrollIntoView({ block: "center" }));
  }
  const cut = sequence.length - sequence.tokens.length;
  return [el("div", { class: "bar" }, legend(colouring.scale)), body,
    cut > 0 && el("p", { class: "note small" }, `The last ${format(cut)} tokens of this sequence are not on this page.`)];
}
