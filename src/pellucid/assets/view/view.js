// The dashboard's own script: it draws figures with plotly, filters tables, and asks again while a run trains.
"use strict";

const MARGINS = { margin: { l: 56, r: 12, t: 30, b: 40 }, font: { size: 11 }, legend: { orientation: "h", y: -0.25 } };

async function draw(box) {
  const answer = await fetch(box.dataset.figure);
  const figure = await answer.json();
  if (figure.error) { box.textContent = figure.error; return; }
  const layout = { ...MARGINS, ...figure.layout, uirevision: box.dataset.figure, autosize: true };
  await Plotly.react(box, figure.data, layout, { responsive: true, displaylogo: false });
}

const drawAll = () => Promise.all([...document.querySelectorAll("[data-figure]")].map(draw));

function filter() {
  for (const box of document.querySelectorAll("input.filter")) {
    const table = document.getElementById(box.dataset.table), words = box.value.toLowerCase();
    const only = document.getElementById("set-only");
    for (const row of table.querySelectorAll("tbody tr, :scope > label"))
      row.hidden = !row.textContent.toLowerCase().includes(words) ||
        Boolean(only && only.checked && !row.classList.contains("set"));
  }
}

// A page with figures only draws them anew, so that what is chosen in its form stays; another is replaced.
async function refresh() {
  if (document.querySelector("[data-figure]")) return drawAll();
  const answer = await fetch(location.href);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const typed = [...document.querySelectorAll("input.filter")].map((box) => box.value);
  document.getElementById("main").replaceWith(page.getElementById("main"));
  document.querySelectorAll("input.filter").forEach((box, index) => { box.value = typed[index]; });
  filter();
}

addEventListener("load", () => {
  drawAll();
  document.addEventListener("input", (event) => {
    if (event.target.matches("input.filter, #set-only")) filter();
  });
  const seconds = Number(document.body.dataset.live);
  if (seconds) setInterval(() => { if (!document.hidden) refresh().catch(console.error); }, 1000 * seconds);
});
