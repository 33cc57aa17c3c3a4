// What the pages do without a kernel: search, predictions, lines of the cost model, explorers, cards.
"use strict";

const UP = document.currentScript.dataset.up ?? "";

// Another script of the site, once; it may come from a folder, where nothing can be fetched.
const loaded = {};
const load = name => loaded[name] ??= new Promise(done => {
  document.body.append(Object.assign(document.createElement("script"), {src: UP + name, onload: done}));
});

// -- search: all words, anywhere in a section; those with most of them in their heading first --------------

const found = document.getElementById("found"), asked = document.querySelector("[type=search]");

async function search() {
  await load("search.js");
  const words = asked.value.toLowerCase().split(/\s+/).filter(Boolean);
  const hits = !words.length ? [] : SECTIONS.map(([address, page, heading, text]) => {
    const title = `${page} ${heading}`.toLowerCase(), all = `${title} ${text.toLowerCase()}`;
    const score = words.every(word => all.includes(word)) ? 1 + words.filter(word => title.includes(word)).length : 0;
    const at = text.toLowerCase().indexOf(words[0]);
    return {score, address, name: heading ? `${page}: ${heading}` : page, text: at < 0 ? "" : text.slice(Math.max(0, at - 40), at + 80)};
  }).filter(hit => hit.score).sort((a, b) => b.score - a.score).slice(0, 12);
  found.replaceChildren(...hits.map(({address, name, text}) => {
    const hit = document.createElement("li"), link = document.createElement("a");
    Object.assign(link, {href: UP + address, textContent: name});
    hit.append(link, text && ` … ${text} …`);
    return hit;
  }));
  if (words.length && !hits.length) found.textContent = "Nothing has all these words.";
  found.hidden = !words.length;
}
if (asked) {
  asked.addEventListener("input", search);
  asked.form.addEventListener("submit", event => { event.preventDefault(); found.querySelector("a")?.click() });
  asked.form.addEventListener("keydown", event => { if (event.key == "Escape") found.hidden = true });
}

// -- predictions and lines: committing to an answer unfolds what answers it, and is kept for a reload -------

const entry = form => `three-axes ${location.pathname.split("/").at(-1)} ${form.dataset.name}`;
function keepAnswer(form, answer) { try { localStorage.setItem(entry(form), answer) } catch {} }  // it may be refused
function keptAnswer(form) { try { return localStorage.getItem(entry(form)) } catch { return null } }

function unfold(name) {
  const answers = [...document.querySelectorAll(`details.answer[data-answers~="${name}"]`)];
  for (const answer of answers) {
    answer.open = true;
    answer.querySelector("summary").textContent = "What this cell showed";
  }
  return answers;
}

function commitVote(form) {
  const name = form.dataset.name, chosen = form.querySelector("input:checked");
  if (!chosen) return;
  for (const answer of unfold(name)) {
    if (answer.nextElementSibling) continue;
    answer.querySelector(".said")?.remove();
    if (answer.previousElementSibling.textContent.includes(name + ".reveal("))
      answer.insertAdjacentHTML("beforeend", '<p class="said"></p>'),
      answer.lastElementChild.textContent = `You predicted: ${chosen.value}.`;
  }
  keepAnswer(form, chosen.value);
}
for (const form of document.querySelectorAll("form.question[data-name]")) {
  form.addEventListener("submit", event => { event.preventDefault(); commitVote(form) });
  const before = keptAnswer(form);
  for (const input of form.querySelectorAll("input")) input.checked = input.value == before;
  commitVote(form);
}

// A number by the drop's line. A known mistake's number is answered by its reason.
function commitNumber(form) {
  const {name, unit, shown, right, near, mistakes} = form.dataset, field = form.querySelector("input");
  const mine = field.valueAsNumber, is = number => Math.abs(mine - number) <= Number(near) * 1.001;
  if (Number.isNaN(mine)) return;
  const why = JSON.parse(mistakes).find(([number]) => is(number))?.[1] ?? "";
  form.querySelector(".said").textContent = is(right) ? `Right: ${shown}. What was measured is below.`
    : `You say ${mine} ${unit}. By the line it is ${shown}. ${why} What was measured is below.`;
  unfold(name);
  keepAnswer(form, field.value);
}
for (const form of document.querySelectorAll("form.line")) {
  form.addEventListener("submit", event => { event.preventDefault(); commitNumber(form) });
  form.querySelector("input").value = keptAnswer(form) ?? "";
  commitNumber(form);
}

// -- what scrolls can be reached by the keyboard ----------------------------------------------------------

function reachable() {
  for (const box of document.querySelectorAll("main *"))
    if (box.scrollWidth > box.clientWidth && /auto|scroll/.test(getComputedStyle(box).overflowX)) box.tabIndex = 0;
}
addEventListener("load", reachable);
addEventListener("resize", reachable);

// -- explorers: every setting was computed before, and is loaded when its explorer comes near -------------

const RANKS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"];
const FILLED = {F: 0.35, B: 1, I: 1, W: 0.6};  // of a rank's colour
const TALL = {F: 24, B: 24, I: 24, W: 14};
const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

// "F0.2B0" -> [{kind, microbatch, chunk, start, end}], in units of one chunk's forward.
function operations(text) {
  let free = 0;
  return [...text.matchAll(/(?:\.(\d+))?([FBIW])(\d+)('*)/g)].map(([, idle, kind, microbatch, marks]) => {
    const start = free + Number(idle ?? 0);
    free = start + (kind == "B" ? 2 : 1);
    return {kind, microbatch: Number(microbatch), chunk: marks.length, start, end: free};
  });
}

// Chunks held from each moment on: a forward's from its start, until its backward ends.
function levels(ops) {
  let held = 0;
  return ops.map(op => {
    held += op.kind == "F" ? 1 : op.kind == "B" || op.kind == "W" ? -1 : 0;
    return [op.kind == "F" ? op.start : op.end, held];
  });
}

function mixed(colour, share) {  // a colour on white
  const parts = [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));
  return parts.map(c => Math.round(share * c + (1 - share) * 255));
}

// Up to the unit `until`; with the time axis and the scale of the strips of `whole`, all that is drawn on one axis.
function drawSchedule(plot, [, ...texts], until = Infinity, whole = texts) {
  const chunks = Math.max(1, ...texts.map(t => 1 + Math.max(...operations(t).map(op => op.chunk))));
  const longest = Math.max(...whole.map(text => operations(text).at(-1).end)), stop = until * chunks;
  const heldAtMost = moments => Math.max(0, ...moments.map(([, held]) => held));
  const rows = texts.map(text => operations(text).filter(op => op.start < stop));
  const moments = texts.map(text => levels(operations(text)).filter(([at]) => at < stop));
  const left = 52, wide = 860, row = rows.length > 4 ? 48 : 56, strip = row - 32;
  const svg = shape("svg", {viewBox: `0 0 1040 ${rows.length * row + 34}`, role: "img"}, plot);
  const x = at => left + wide * at / longest;
  const peaks = moments.map(heldAtMost), most = Math.max(...whole.map(text => heldAtMost(levels(operations(text)))));
  rows.forEach((ops, rank) => {
    const top = rank * row + 2, floor = top + 26 + strip;
    shape("text", {x: 0, y: top + 17}, svg, `rank ${rank}`);
    const named = ops.every(op => x(op.end) - x(op.start) > 9 + 7 * String(op.microbatch).length);
    for (const op of ops) {
      const [red, green, blue] = mixed(RANKS[rank % 8], FILLED[op.kind]);
      const high = TALL[op.kind], y = top + 12 - high / 2;
      const box = shape("rect", {x: x(op.start), y, width: x(Math.min(op.end, stop)) - x(op.start), height: high,
        fill: `rgb(${red},${green},${blue})`, stroke: "var(--paper)", "stroke-width": 1}, svg);
      shape("title", {}, box, `${op.kind}${op.microbatch}${op.chunk ? `, chunk ${op.chunk + 1}` : ""}`);
      if (op.chunk % 2) shape("rect", {x: x(op.start), y: y + high - 3, width: x(op.end) - x(op.start),
        height: 3, fill: "#222"}, svg);
      if (named) shape("text", {x: (x(op.start) + x(op.end)) / 2, y: top + 16, "text-anchor": "middle",
        style: `font-weight:700;font-size:11px;fill:${0.3 * red + 0.59 * green + 0.11 * blue < 107 ? "#fff" : "#222"}`},
        svg, op.kind + op.microbatch);
    }
    let path = `M${x(0)} ${floor}`, height = 0;
    for (const [at, held] of moments[rank]) {
      path += `H${x(at)}V${floor - (strip - 4) * held / most}`;
      height = held;
    }
    shape("path", {d: `${path}H${x(Math.min(longest, stop))}V${floor}Z`, fill: "#8c8c8c", "fill-opacity": 0.55}, svg);
    shape("text", {x: left + wide + 8, y: floor - 4}, svg,
      `peak ${+(peaks[rank] / chunks).toPrecision(3)} in flight`);
  });
  const base = rows.length * row + 6, units = longest / chunks;
  const step = [1, 2, 5, 10, 20, 50].find(s => units / s <= 12) ?? 100;
  shape("line", {x1: left, x2: left + wide, y1: base, y2: base, stroke: "var(--ink)"}, svg);
  for (let at = 0; at <= units; at += step)
    shape("text", {x: x(at * chunks), y: base + 16, "text-anchor": "middle"}, svg, at);
  shape("text", {x: left + wide + 8, y: base + 16}, svg, "units of time");
}

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const LOOKS = {"weights": "#222222", "gradients": "#777777", "optimizer": "#B5B5B5", "activations": "dots",
  "logits": "cross", "gathered weights": "lines", "overhead": "#FFFFFF"};

// A frame -> for each stage, GB by part.
function stages(frame, parts, gigabytes) {
  const numbers = [...frame.matchAll(/../g)].map(([two]) =>
    gigabytes[LETTERS.indexOf(two[0]) * 64 + LETTERS.indexOf(two[1])]);
  const made = [];
  for (let i = 0; i < numbers.length; i += parts.length) made.push(numbers.slice(i, i + parts.length));
  return made;
}

function drawMemory(plot, frame) {
  const {parts, gigabytes, holds} = FRAMES.memory, bars = stages(frame, parts, gigabytes);
  const totals = bars.map(bar => bar.reduce((a, b) => a + b, 0)), high = 250, top = 22, left = 60;
  const most = 1.08 * Math.max(holds, ...totals), y = gb => top + high * (1 - gb / most);
  const svg = shape("svg", {viewBox: `0 0 760 ${high + top + 40}`, role: "img"}, plot);
  svg.insertAdjacentHTML("beforeend", `<defs>
    <pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#fff"/><circle cx="2" cy="2" r="1.1" fill="#222"/></pattern>
    <pattern id="cross" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#fff"/><path d="M0 0L6 6M6 0L0 6" stroke="#222" stroke-width=".9"/></pattern>
    <pattern id="lines" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#fff"/><path d="M0 3H6" stroke="#222"/></pattern></defs>`);
  const wide = 640 / bars.length;
  bars.forEach((bar, k) => {
    let base = 0;
    bar.forEach((gb, i) => {
      if (!gb) return;
      const look = LOOKS[parts[i]];
      const box = shape("rect", {x: left + wide * (k + 0.2), width: 0.6 * wide, y: y(base + gb), height: y(base) - y(base + gb),
        fill: look[0] == "#" ? look : `url(#${look})`, stroke: "var(--ink)", "stroke-width": 0.8}, svg);
      shape("title", {}, box, `${parts[i]}: ${gb} GB`);
      base += gb;
    });
    const middle = left + wide * (k + 0.5);
    shape("text", {x: middle, y: y(base) - 5, "text-anchor": "middle",
      style: base == Math.max(...totals) ? "font-weight:700" : ""}, svg, base.toFixed(1));
    shape("text", {x: middle, y: high + top + 18, "text-anchor": "middle"}, svg, `stage ${k}`);
  });
  shape("line", {x1: left, x2: 700, y1: y(0), y2: y(0), stroke: "var(--ink)"}, svg);
  shape("line", {x1: left, x2: 700, y1: y(holds), y2: y(holds), stroke: "#D55E00", "stroke-width": 2,
    "stroke-dasharray": "7 4"}, svg);
  shape("text", {x: 704, y: y(holds) + 4}, svg, `holds ${holds.toFixed(0)}`);
  shape("text", {x: 0, y: 14}, svg, "GB on each GPU");
}

function swatches(list) {
  return `<ul class="swatches">${list.map(([style, text]) => `<li>${style ? `<i style="${style}"></i>` : ""}${text}</li>`).join("")}</ul>`;
}
const HATCH = {dots: "radial-gradient(#222 25%,#fff 28%) 0 0/5px 5px", lines: "repeating-linear-gradient(#fff 0 3px,#222 3px 4px)",
  cross: "repeating-linear-gradient(45deg,#222 0 1px,#0000 1px 4px),repeating-linear-gradient(-45deg,#222 0 1px,#fff 1px 4px)"};

const GREY = "the grey strip: microbatches in flight";
const EXPLORERS = {
  orders: {
    unused: () => [],
    frame: values => FRAMES.orders.frames[`${values.m} ${values.p}`],
    ends: frame => Math.max(...frame.flatMap(([, ...texts]) => texts.map(text => operations(text).at(-1).end))),
    title: (frame, values) => `GPipe above 1F1B, ${values.p} stages, ${values.m} microbatches, until unit ${values.until}`,
    draw: (plot, frame, {until}) => {
      for (const [name, ...texts] of frame) {
        const units = Math.max(...texts.map(text => operations(text).at(-1).end));
        const panel = Object.assign(document.createElement("p"), {textContent: name + (until >= units ? `: ${units} units` : "")});
        plot.append(panel);
        drawSchedule(plot, [name, ...texts], until, frame.flatMap(([, ...all]) => all));
        plot.lastChild.setAttribute("aria-label", panel.textContent);
      }
    },
    legend: () => swatches([["", "light: forward (F)"], ["", "dark: backward (B)"], ["", GREY], ["", "empty: idle"]]),
  },
  schedules: {
    // The other schedules have their own number of chunks.
    unused: values => values.schedule == "interleaved" ? [] : ["v"],
    frame: values => FRAMES.schedules.frames[
      `${values.schedule} ${values.p} ${values.m} ${values.schedule == "interleaved" ? values.v : 1}`],
    title: frame => frame[0],
    draw: (plot, frame) => drawSchedule(plot, frame),
    legend: () => swatches([["", "light: forward (F)"], ["", "dark: backward (B), or the gradient of the input (I)"],
      ["", "low: gradient of the weights (W)"], ["", "underlined: second chunk of layers"], ["", "empty: idle"]]),
  },
  memory: {
    unused: () => [],
    frame: values => {
      const controls = Object.entries(FRAMES.memory.controls);
      const place = controls.reduce((at, [name, {options}]) => at * options.length + options.indexOf(values[name]), 0);
      return FRAMES.memory.frames[place];
    },
    title: (frame, values) => {
      const most = Math.max(...stages(frame, FRAMES.memory.parts, FRAMES.memory.gigabytes).map(bar => bar.reduce((a, b) => a + b, 0)));
      return `${values.model} on ${values.d * values.t * values.p} GPUs: ${most.toFixed(1)} GB on the fullest stage, ${
        most <= FRAMES.memory.holds ? "which fits" : "which does not fit"}`;
    },
    draw: drawMemory,
    legend: () => swatches(FRAMES.memory.parts.map(part => [
      `background:${LOOKS[part][0] == "#" ? LOOKS[part] : HATCH[LOOKS[part]]}`, part])),
  },
};

// A slider for the last unit of time that is drawn, and a button that moves it: half a second a unit.
function playing(values, end, draw) {
  const holder = document.createElement("label"), slider = document.createElement("input");
  const shown = document.createElement("output"), play = document.createElement("button");
  Object.assign(slider, {type: "range", name: "until", min: 1});
  play.type = "button";
  holder.append("until unit", slider, shown);
  let ticking = null, last = end();
  function stop() { clearInterval(ticking); ticking = null; holder.show() }
  holder.show = () => {  // another setting has another last unit
    values.until = values.until == last ? end() : Math.min(values.until, end());
    last = end();
    slider.max = last;
    slider.value = shown.value = values.until;
    play.textContent = ticking ? "stop" : "play";
  };
  slider.addEventListener("input", () => {
    const at = Number(slider.value);
    stop();
    values.until = at;
    draw();
  });
  play.addEventListener("click", () => {
    if (ticking) return stop();
    if (values.until == last) values.until = 1;
    ticking = setInterval(() => { values.until += 1; if (values.until >= last) stop(); draw() }, 500);
    draw();
  });
  play.show = () => {};
  return [holder, play];
}

function explorer(place) {
  const {controls} = FRAMES[place.dataset.explorer], kind = EXPLORERS[place.dataset.explorer];
  const values = JSON.parse(place.dataset.values), form = document.createElement("form");
  form.className = "controls";
  for (const [name, {label, options}] of Object.entries(controls)) {
    const holder = form.appendChild(document.createElement("label"));
    holder.append(label);
    if (typeof options[0] == "number") {
      const slider = holder.appendChild(document.createElement("input")), shown = holder.appendChild(document.createElement("output"));
      Object.assign(slider, {type: "range", name, min: 0, max: options.length - 1, value: options.indexOf(values[name])});
      slider.addEventListener("input", () => { values[name] = options[slider.value]; draw() });
      holder.show = () => { shown.value = values[name]; slider.setAttribute("aria-valuetext", values[name]) };
    } else {
      const choice = holder.appendChild(document.createElement("select"));
      choice.name = name;
      choice.append(...options.map(option => new Option(option, option, false, option == values[name])));
      choice.addEventListener("change", () => { values[name] = choice.value; draw() });
      holder.show = () => {};
    }
    holder.dataset.control = name;
  }
  // What plays changes twice a second, which nobody wants read aloud.
  const title = Object.assign(document.createElement("h4"), {ariaLive: kind.ends ? "off" : "polite"}), plot = document.createElement("div");
  plot.className = "plot";
  function draw() {
    const frame = kind.frame(values), unused = kind.unused(values);
    for (const holder of form.children) { holder.show(); holder.hidden = unused.includes(holder.dataset.control) }
    const refused = typeof frame == "string" && (place.dataset.explorer == "schedules" || frame[0] == "!");
    title.textContent = refused ? frame.replace(/^!/, "") : kind.title(frame, values);
    title.classList.toggle("refused", refused);
    plot.replaceChildren();
    if (refused) return;
    kind.draw(plot, frame, values);
    if (plot.children.length == 1) plot.firstChild.setAttribute("aria-label", title.textContent);
  }
  if (kind.ends) form.append(...playing(values, () => kind.ends(kind.frame(values)), draw));
  form.addEventListener("submit", event => event.preventDefault());
  place.replaceChildren(form, title, plot);
  place.insertAdjacentHTML("beforeend", kind.legend());
  draw();
}
const near = new IntersectionObserver(entries => entries.filter(entry => entry.isIntersecting).forEach(async ({target}) => {
  near.unobserve(target);
  if (!window.FRAMES?.[target.dataset.explorer]) await load(`frames-${target.dataset.explorer}.js`);  // slides have them
  explorer(target);
}), {rootMargin: "400px"});
for (const place of document.querySelectorAll("[data-explorer]")) near.observe(place);

// -- cards -----------------------------------------------------------------------------------------------

const deck = document.getElementById("deck");
if (deck) {
  const all = [...deck.children], drops = document.getElementById("drops"), one = document.getElementById("one");
  const round = document.getElementById("round");
  let queue = [];
  const judge = [document.getElementById("known"), document.getElementById("again")];
  const turn = (card, to) => {
    card.setAttribute("aria-pressed", to);
    for (const button of judge) button.disabled = !queue[0] || queue[0].getAttribute("aria-pressed") == "false";
  };
  const single = () => deck.classList.contains("single");
  function lay() {
    for (const card of all) {
      turn(card, "false");
      card.hidden = single() ? card != queue[0] : !queue.includes(card);
    }
    round.hidden = !single();
    round.lastElementChild.textContent = queue.length ? `${queue.length} left` : "All known.";
    one.textContent = single() ? "all at once" : "one at a time";
  }
  function take() {
    queue = all.filter(card => !drops.value || card.dataset.drop == drops.value);
    lay();
  }
  for (const card of all)
    card.addEventListener("click", () => turn(card, card.getAttribute("aria-pressed") == "false"));
  drops.addEventListener("change", take);
  one.addEventListener("click", () => { deck.classList.toggle("single"); take() });
  judge[0].addEventListener("click", () => { queue.shift(); lay() });
  judge[1].addEventListener("click", () => {  // back, three places further down
    const card = queue.shift();
    if (card) queue.splice(Math.min(3, queue.length), 0, card);
    lay();
  });
  take();
}
