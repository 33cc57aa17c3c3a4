// The first page: three cuts of one cube. The address keeps the one that was chosen: #cut=tp.
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

function show(input) {
  const most = choices.reduce((a, b) => Number(a.dataset.gb) > Number(b.dataset.gb) ? a : b);
  const called = input => input.parentElement.textContent.trim();
  predicted ??= input;
  const right = predicted == most ? "which is right" : `but it is ${called(most)}`;
  document.getElementById("does").textContent =
    `You predicted ${called(predicted)}, ${right}. You see a cut of ${called(input)}. ${input.dataset.does}`;
  document.getElementById("does").append(" The same question of a toy: ", Object.assign(document.createElement("a"),
    {href: cuts.dataset.why, textContent: "drop 01"}), ".");
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
const chosen = () => cuts.querySelector("input:checked");
cuts.addEventListener("submit", event => {
  event.preventDefault();
  if (chosen()) show(chosen());
});
cuts.addEventListener("change", () => { if (predicted) show(chosen()) });  // afterwards all three may be seen
const kept = choices.find(input => input.value == state.get("cut"));
drawCube(0);
if (kept) {
  kept.checked = true;
  show(kept);
}
