// The values of all lines at the pointer, as text below a chart.
for (const chart of document.querySelectorAll("svg[data-x]")) {
  const limits = (text) => text.split(" ").map(Number);
  const [x0, x1] = limits(chart.dataset.x), [y0, y1] = limits(chart.dataset.y);
  const [left, right, top, bottom] = limits(chart.dataset.area);
  const share = "share" in chart.dataset;
  const shown = (y) => (share ? `${Math.round(100 * y)}%` : String(Number(y.toPrecision(3))));
  const lines = [...chart.querySelectorAll("polyline[data-label]")].map((line) => ({
    label: line.dataset.label,
    points: line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number)),
  }));
  const readout = chart.parentNode.querySelector(".readout");
  chart.addEventListener("pointermove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
    const nearest = ({ points }) => points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
    const values = lines.map((line) => {
      const y = y0 + ((bottom - nearest(line)[1]) / (bottom - top)) * (y1 - y0);
      return `${line.label} ${shown(y)}`;
    });
    const x = x0 + ((Math.min(right, Math.max(left, at)) - left) / (right - left)) * (x1 - x0);
    readout.textContent = `at ${Number(x.toPrecision(4))}: ${values.join(", ")}`;
  });
  chart.addEventListener("pointerleave", () => (readout.textContent = ""));
}
