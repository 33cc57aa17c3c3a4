// The first page: three cuts of one cube, and a schedule that is ordered by hand. The address keeps both:
// #cut=tp&order=F0B0F1…-F0…-F0….
"use strict";

const state = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");

function keep(name, value) {
  state.set(name, value);
  history.replaceState(null, "", `#${state}`);
}

// -- the cube --------------------------------------------------------------------------------------------

const CUT_ALONG = {dp: 0, tp: 2, pp: 1};  // x: batch, y: layers, z: width
const STILL = matchMedia("(prefers-reduced-motion: reduce)").matches;
let along = 0, moving = 0, predicted = null;

function drawCube(gap) {
  const place = document.getElementById("cube"), svg = shape("svg", {viewBox: "-150 -118 275 226", role: "img"}, document.createElement("div"));
  const at = ([x, y, z]) => `${(x - z) * 15},${(x + z) * 8.6 - y * 14}`;
  const most = [5.2, 5.2, 5.2];
  for (let gpu = 0; gpu < 4; gpu++) {
    const low = [0, 0, 0], high = [...most];
    low[along] = gpu * (1.3 + gap) - 1.5 * gap;
    high[along] = low[along] + 1.3;
    const corner = picks => picks.map((pick, axis) => pick ? high[axis] : low[axis]);
    const faces = [[[0, 1, 0], [1, 1, 0], [1, 1, 1], [0, 1, 1]], [[0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1]],
      [[1, 0, 0], [1, 0, 1], [1, 1, 1], [1, 1, 0]]];
    faces.forEach((face, i) => {
      const [red, green, blue] = mixed(RANKS[gpu], [0.55, 0.8, 1][i]);
      shape("polygon", {points: face.map(corner).map(at).join(" "), fill: `rgb(${red},${green},${blue})`,
        stroke: "var(--paper)", "stroke-width": 0.8, "stroke-linejoin": "round"}, svg);
    });
  }
  for (const [text, x, y] of [["batch", 88, 92], ["width", -92, 92], ["layers", -148, -10]])
    shape("text", {x, y, "text-anchor": text == "layers" ? "start" : "middle"}, svg, text);
  svg.setAttribute("aria-label", `A cube of batch, width and layers, cut along the ${["batch", "layers", "width"][along]}: a piece for each of four GPUs`);
  place.replaceChildren(svg);
}

function cut(axis) {
  const mine = ++moving, begin = performance.now(), open = 0.55;
  function step(now) {
    if (mine != moving) return;
    const t = STILL ? 2 : (now - begin) / 350;
    if (t >= 1) along = CUT_ALONG[axis];
    drawCube(open * Math.min(1, Math.abs(1 - t)));
    if (t < 2) requestAnimationFrame(step);
  }
  step(begin);
}

const cuts = document.getElementById("cuts"), choices = [...cuts.querySelectorAll("input")];

function chose(input) {
  const most = choices.reduce((a, b) => Number(a.dataset.gb) > Number(b.dataset.gb) ? a : b);
  const called = input => input.parentElement.textContent.trim();
  predicted ??= input;
  const right = predicted == most ? "which is right" : `but it is ${called(most)}`;
  document.getElementById("does").textContent =
    `You predicted ${called(predicted)}, ${right}. You see a cut of ${called(input)}. ${input.dataset.does}`;
  const bars = choices.map(other => {
    const row = document.createElement("p"), bar = document.createElement("i");
    bar.style.width = `${Number(other.dataset.gb) / Number(most.dataset.gb) * 100}%`;
    row.append(`${called(other)}: ${other.dataset.gb} GB`, bar);
    row.className = other == input ? "chosen" : "";
    return row;
  });
  document.getElementById("bars").replaceChildren(...bars);
  keep("cut", input.value);
  cut(input.value);
}
cuts.addEventListener("change", event => chose(event.target));
const kept = choices.find(input => input.value == state.get("cut"));
drawCube(0);
if (kept) {
  kept.checked = true;
  chose(kept);
}

// -- the schedule ----------------------------------------------------------------------------------------

const orderPlot = document.getElementById("order"), buttons = [...document.querySelectorAll("#orders button")];
const parsed = text => text.split("-").map(row => row.match(/[FB]\d/g) ?? []);
let rows = parsed(buttons[0].value);

// When each operation begins, as far as the order lets them: a forward follows that of the stage before, a
// backward that of the stage behind. So with the last stage's own forward, every need is met.
function run(rows) {
  const ends = rows.map(() => ({})), next = rows.map(() => 0), free = rows.map(() => 0), text = rows.map(() => "");
  const last = rows.length - 1;
  const needs = (rank, op) => op[0] == "F" ? (rank ? [rank - 1, op] : null) : rank < last ? [rank + 1, op] : [rank, "F" + op[1]];
  for (let again = true; again;) {
    again = false;
    rows.forEach((ops, rank) => {
      for (; next[rank] < ops.length; next[rank]++, again = true) {
        const op = ops[next[rank]], need = needs(rank, op), own = "F" + op[1];
        if (need && !(need[1] in ends[need[0]]) || op[0] == "B" && !(own in ends[rank])) break;
        const start = Math.max(free[rank], need ? ends[need[0]][need[1]] : 0);
        if (start > free[rank]) text[rank] += `.${start - free[rank]}`;
        text[rank] += op;
        ends[rank][op] = free[rank] = start + (op[0] == "B" ? 2 : 1);
      }
    });
  }
  const waits = rows.flatMap((ops, rank) => {
    if (next[rank] == ops.length) return [];
    const op = ops[next[rank]], need = needs(rank, op);
    const [of, what] = need && !(need[1] in ends[need[0]]) ? need : [rank, "F" + op[1]];
    return [`rank ${rank} waits for ${of == rank ? "its own" : `rank ${of}'s`} ${what}`];
  });
  return {text, waits, length: Math.max(...free)};
}

function showOrder(focus) {
  const {text, waits, length} = run(rows), work = 3 * rows[0].length / 2;
  // What hangs is drawn by its order alone.
  orderPlot.replaceChildren();
  drawSchedule(orderPlot, ["", ...waits.length ? rows.map(ops => ops.join("")) : text], {timeless: waits.length > 0});
  const peaks = text.map(row => Math.max(...levels(operations(row)).map(([, held]) => held)));
  const said = waits.length ? `This hangs: ${waits.join(", ")}.`
    : `${length} units, ${(100 * (1 - work / length)).toFixed(0)} % of the time idle. In flight at most: ${peaks.join(", ")} microbatches.`
      + (length > orderPlot.dataset.best ? "" : peaks.every((peak, rank) => peak <= rows.length - rank)
        ? " As short as it can be, and with few in flight: this is 1F1B." : " As short as it can be. 1F1B holds fewer.");
  document.getElementById("length").textContent = said;
  document.getElementById("length").classList.toggle("refused", waits.length > 0);
  const svg = orderPlot.firstChild;
  svg.setAttribute("role", "group");
  svg.setAttribute("aria-label", said);
  for (const box of svg.querySelectorAll("[data-op]")) {
    const [rank, place] = box.dataset.op.split(" ").map(Number);
    for (const [name, value] of Object.entries({tabindex: 0, role: "button", "aria-label": `${rows[rank][place]} on rank ${rank}, place ${place + 1}`}))
      box.setAttribute(name, value);
  }
  if (focus) svg.querySelector(`[data-op="${focus}"]`).focus();
}

function changed(focus) {
  showOrder(focus);
  keep("order", rows.map(ops => ops.join("")).join("-"));
}

function swap(rank, place, by) {
  const ops = rows[rank], to = place + by;
  if (to < 0 || to >= ops.length) return place;
  [ops[place], ops[to]] = [ops[to], ops[place]];
  changed(`${rank} ${to}`);
  return to;
}

orderPlot.addEventListener("keydown", event => {
  const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (!by || !event.target.dataset.op) return;
  event.preventDefault();
  swap(...event.target.dataset.op.split(" ").map(Number), by);
});
orderPlot.addEventListener("pointerdown", event => {
  if (!event.target.dataset.op) return;
  event.preventDefault();
  let [rank, place] = event.target.dataset.op.split(" ").map(Number);
  event.target.focus();
  orderPlot.setPointerCapture(event.pointerId);
  function move(event) {  // past the middle of a neighbour
    for (const by of [-1, 1]) {
      const box = orderPlot.querySelector(`[data-op="${rank} ${place + by}"]`)?.getBoundingClientRect();
      if (box && by * (event.clientX - (box.left + box.width / 2)) > 0) return void (place = swap(rank, place, by));
    }
  }
  orderPlot.addEventListener("pointermove", move);
  orderPlot.addEventListener("lostpointercapture", () => orderPlot.removeEventListener("pointermove", move), {once: true});
});
for (const button of buttons) button.addEventListener("click", () => { rows = parsed(button.value); changed() });

const sent = parsed(state.get("order") ?? ""), whole = ops => [...ops].sort().join();
if (sent.length == rows.length && sent.every(ops => whole(ops) == whole(rows[0]))) rows = sent;
showOrder();
