// Episodes, by step, environment and reward: the conversation, the rewards by name, and the tokens.

const browse = { kind: "training", source: null, episode: null, sequence: 0, tab: "tokens", mode: "logprob", token: null,
  environment: "", sort: "gap", text: "", from: "", to: "" };
const LISTED = 300;

function sourcesOf(kind) {
  return data[kind].sources;
}

function labelOf(source) {
  return source.kind === "evaluation" ? `${source.step} ${source.name}` : format(source.step);
}

function rolloutsView() {
  const kinds = ["training", "evaluation"].filter((kind) => sourcesOf(kind).length);
  if (!kinds.length) {
    return [el("p", { class: "note" }, data.training.steps || data.evaluation.steps
      ? "The rollouts of this run could not be read." : "This run has no rollouts: it learns from data files, or no step has been finished yet.")];
  }
  if (!kinds.includes(browse.kind)) [browse.kind] = kinds;
  const body = el("div");
  const draw = () => body.replaceChildren(...browsing(kinds, draw).filter(Boolean));
  draw();
  return [body];
}

function pickSource(index) {
  Object.assign(browse, { source: index, episode: null, sequence: 0, token: null });
}

function browsing(kinds, draw) {
  const sources = sourcesOf(browse.kind);
  if (browse.source === null || !sources[browse.source]) {
    const recorded = sources.findLastIndex((source) => source.episodes.some((one) => one.sequences.length));
    pickSource(recorded >= 0 ? recorded : sources.length - 1);
  }
  const source = sources[browse.source];
  const list = chosenEpisodes(source);
  if (browse.episode === null || !list.includes(source.episodes[browse.episode])) {
    Object.assign(browse, { episode: list.length ? source.episodes.indexOf(list[0]) : null, sequence: 0, token: null });
  }
  const set = (name) => (value) => { browse[name] = value; draw(); };
  const environments = [...new Set(source.episodes.map((one) => one.environment))];
  const typed = (name, label, width) => {
    const input = el("input", { type: "number", step: "any", value: browse[name], "aria-label": label, placeholder: label,
      onchange: (event) => set(name)(event.target.value) });
    input.style.width = width;
    return input;
  };
  return [
    el("section", { class: "panel" },
      el("div", { class: "bar" },
        kinds.length > 1 && el("span", { class: "turns" }, kinds.map((kind) => el("button", { "aria-pressed": String(kind === browse.kind),
          onclick: () => { browse.kind = kind; pickSource(null); draw(); } }, kind))),
        environments.length > 1 && choice("Environment", [["", "all"], ...environments.map((name) => [name, name])], browse.environment, set("environment")),
        el("label", null, "Reward", typed("from", "from", "84px"), typed("to", "to", "84px")),
        choice("Sort by", [["gap", "widest gap"], ["order", "group"], ["task", "task"], ["high", "highest reward"], ["low", "lowest reward"], ["long", "longest"]], browse.sort, set("sort")),
        el("input", { type: "search", placeholder: "Search in messages", "aria-label": "Search in messages", value: browse.text, onchange: (event) => set("text")(event.target.value) })),
      el("div", { class: "chips", id: "steps" }, el("span", { class: "quiet" }, "Step"), sources.map((each, i) =>
        el("button", { class: each.episodes.some((one) => one.sequences.length) && "has", "aria-pressed": String(i === browse.source),
          "data-step": each.step, onclick: () => { pickSource(i); draw(); } }, labelOf(each)))),
      el("p", { class: "note small" }, heldNote(source))),
    el("div", { class: "browse" },
      el("div", { class: "panel list" }, list.length ? list.slice(0, LISTED).map((one) => item(one, source, draw)) : el("p", { class: "note" }, "No episode is like that."),
        list.length > LISTED && el("p", { class: "note" }, `and ${list.length - LISTED} more; narrow the search to see them`)),
      el("div", null, browse.episode === null ? null : episodeView(source.episodes[browse.episode], source, draw))),
  ];
}

function heldNote(source) {
  const held = sourcesOf(browse.kind).length, all = data[browse.kind].steps;
  const steps = held < all ? `This page holds ${format(held)} of ${format(all)} ${browse.kind === "training" ? "steps" : "evaluations"}` : `This page holds all ${format(all)} ${browse.kind === "training" ? "steps" : "evaluations"}`;
  const episodes = source.episodes.length < source.total ? `, and of this one ${format(source.episodes.length)} of ${format(source.total)} episodes` : `, and all ${format(source.total)} episodes of this one`;
  const others = held < all || source.episodes.length < source.total ? "; the run folder has the others" : "";
  return `${steps}${episodes}${others}. A dot marks steps that were recorded token by token.`;
}

function chosenEpisodes(source) {
  const [from, to] = [browse.from, browse.to].map((value) => (value === "" ? null : Number(value)));
  const text = browse.text.toLowerCase();
  const found = source.episodes.filter((one) => (!browse.environment || one.environment === browse.environment)
    && (from === null || one.reward >= from) && (to === null || one.reward <= to)
    && (!text || one.messages.some((message) => message.content.toLowerCase().includes(text))));
  const by = { task: (one) => one.task, high: (one) => -one.reward, low: (one) => one.reward, long: (one) => -one.response_length,
    gap: (one) => (one.gap === undefined ? Number(!one.sequences.length) : -1 - one.gap) }[browse.sort];
  return by ? found.sort((a, b) => by(a) - by(b)) : found;
}

function item(one, source, draw) {
  const index = source.episodes.indexOf(one);
  const said = one.messages.length ? one.messages[one.messages.length - 1].content : "";
  return el("button", { class: "item", "aria-pressed": String(index === browse.episode), "data-episode": index,
    onclick: () => { Object.assign(browse, { episode: index, sequence: 0, token: null }); draw(); } },
  el("span", { class: "line" }, el("b", null, format(one.reward)), `group ${one.group} · ${one.sample}`,
    el("span", { class: "end" }, one.gap === undefined ? `${format(one.response_length)} tokens` : `gap ${gapText(one.gap)}`)),
  el("div", { class: "said" }, visible(shorten(said.replaceAll("\n", " "), 120))));
}

function episodeView(one, source, draw) {
  const tab = one.sequences.length ? browse.tab : "messages";
  const pick = (name, label) => el("button", { "aria-pressed": String(tab === name), disabled: name === "tokens" && !one.sequences.length,
    onclick: () => { browse.tab = name; draw(); } }, label);
  const facts = [["environment", one.environment], ["task", `${one.task}${one.id ? `, ${one.id}` : ""}`], ["group · sample", `${one.group} · ${one.sample}`],
    ...(one.gold ? [["right answer", one.gold]] : []), ...(one.answer ? [["answered", one.answer]] : []),
    ...(advantageOf(one) === null ? [] : [["advantage", format(advantageOf(one))]]),
    ["turns", format(one.turns)], ["model's tokens", format(one.response_length)], ["ended by", { length: "its length limit", context: "a full context" }[one.stop] || one.stop],
    ["weight versions", [...new Set(one.versions)].join(" to ")], ...(one.gap === undefined ? [] : [["widest gap", `${gapText(one.gap)} nats`]])];
  return [
    el("section", { class: "panel" }, el("div", { class: "two" },
      el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", null, name), el("dd", null, visible(shorten(String(value), 200)))])),
      el("table", { class: "rows" }, el("thead", null, el("tr", null, el("th", null, "reward"), el("th", { class: "n" }, format(one.reward)))),
        el("tbody", null, Object.entries(one.rewards).map(([name, value]) => el("tr", null, el("td", null, visible(name)), el("td", { class: "n" }, format(value)))))))),
    el("section", { class: "panel", id: "episode" },
      el("div", { class: "bar" }, el("span", { class: "turns" }, pick("tokens", "Tokens"), pick("messages", "Messages")), tab === "tokens" && tokenChoices(one, draw)),
      tab === "tokens" ? tokensOf(one) : one.messages.map(messageView), goldView(one), recordedView(one),
      !one.sequences.length && browse.kind === "training" && el("p", { class: "note small" }, "This episode was not recorded token by token; rollout.record in the config says which are.")),
    groupView(one, source, draw), historyView(one, source, draw),
  ];
}

function tokenChoices(one, draw) {
  const sequence = one.sequences[browse.sequence] || one.sequences[0];
  const modes = colourings(sequence);
  if (!modes.has(browse.mode)) [browse.mode] = modes.keys();
  return [
    choice("Colour by", [...modes].map(([name, { label }]) => [name, label]), browse.mode, (value) => { browse.mode = value; draw(); }),
    one.sequences.length > 1 && choice("Sequence", one.sequences.map((each, i) => [i, `${i + 1} of ${one.sequences.length}`]), browse.sequence,
      (value) => { Object.assign(browse, { sequence: Number(value), token: null }); draw(); }),
  ];
}

function tokensOf(one) {
  return tokenView(one.sequences[browse.sequence] || one.sequences[0], browse.mode, browse.token);
}

function messageView(message) {
  const known = ["assistant", "user", "system", "tool"].includes(message.role);
  return el("div", { class: known ? `message ${message.role}` : "message" }, el("div", { class: "role" }, visible(message.role)),
    message.content && el("pre", null, visible(message.content)),
    (message.images || []).map((url) => el("img", { src: url, alt: `image of the ${message.role}` })));
}

// What the environment recorded beside the conversation, and the rewards of agents and turns.
function recordedView(one) {
  return [
    one.recorded.map((each) => el("div", { class: "message" }, el("div", { class: "role" }, "recorded: ", visible(each.name)),
      each.content && el("pre", null, visible(each.content)), each.images.map((url) => el("img", { src: url, alt: each.name })))),
    one.addressed.length > 0 && el("table", { class: "rows" },
      el("thead", null, el("tr", null, ["sequence", "agent", "reward", "rewards of turns"].map((title) => el("th", null, title)))),
      el("tbody", null, one.addressed.map((each, index) => el("tr", null, el("td", null, String(index + 1)), el("td", null, visible(each.agent)),
        el("td", { class: "n" }, format(each.reward)),
        el("td", null, visible(each.turns.map((turn) => `${turn.turn + 1}: ${turn.name} ${format(turn.value)}`).join(", ")))))))];
}
