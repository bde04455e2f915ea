// Draws a figure with Plotly.react on a node that stays: zoom, hover and legend choices survive a refresh, which st.plotly_chart's do not.
// Colours come as tokens ("$ink") and are resolved for the viewer's theme here; Streamlit calls this again when data or theme change.
function plotly(url) {
  window.__warmwatchPlotly ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = url;
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => { window.__warmwatchPlotly = undefined; reject(new Error("Plotly did not load from " + url)); };
    document.head.appendChild(script);
  });
  return window.__warmwatchPlotly;
}

function isDark(element) {
  const colour = getComputedStyle(element).getPropertyValue("--st-background-color").trim();
  const probe = document.createElement("span");
  probe.style.color = colour || "#fff";
  document.body.appendChild(probe);
  const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
  probe.remove();
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 128;
}

function painted(value, colours) {
  if (typeof value === "string") return value[0] === "$" && colours[value.slice(1)] ? colours[value.slice(1)] : value;
  if (Array.isArray(value)) return typeof value[0] === "number" && typeof value[1] !== "string" ? value : value.map((v) => painted(v, colours));
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, painted(v, colours)]));
  return value;
}

const AXES = ["xaxis", "yaxis"];

// What the viewer zoomed to is kept here: Plotly's own uirevision gives it up as soon as the figure's range moves on, as it does each refresh.
function watchZoom(node, Plotly) {
  node.on("plotly_relayout", (event) => {
    for (const axis of AXES) {
      if (event[axis + ".range[0]"] !== undefined) node.wwZoom[axis] = [event[axis + ".range[0]"], event[axis + ".range[1]"]];
    }
  });
  node.on("plotly_doubleclick", () => goHome(node, Plotly));
}

function goHome(node, Plotly) {
  const home = Object.fromEntries(AXES.map((axis) => (node.wwHome[axis] ? [axis + ".range", node.wwHome[axis]] : [axis + ".autorange", true])));
  Plotly.relayout(node, home).then(() => { node.wwZoom = {}; });
}

export default function (component) {
  const { data, parentElement, setTriggerValue } = component;
  let node = parentElement.querySelector(".ww-chart");
  if (!node) {
    node = document.createElement("div");
    node.className = "ww-chart";
    node.style.width = "100%";
    parentElement.appendChild(node);
  }
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", data.label);
  node.style.height = data.height + "px";
  node.wwClick = (value) => setTriggerValue("click", value);
  node.wwDraw = (node.wwDraw ?? 0) + 1;
  const draw = node.wwDraw;
  plotly(data.plotly).then((Plotly) => {
    if (draw !== node.wwDraw || !node.isConnected) return;
    const figure = painted(JSON.parse(data.figure), isDark(parentElement) ? data.dark : data.light);
    figure.layout.autosize = true;
    figure.layout.uirevision = data.revision;
    if (node.wwRevision !== data.revision) node.wwZoom = {};
    node.wwRevision = data.revision;
    node.wwHome = Object.fromEntries(AXES.map((axis) => [axis, figure.layout[axis].range]));
    for (const axis of AXES) if (node.wwZoom[axis]) figure.layout[axis] = { ...figure.layout[axis], range: node.wwZoom[axis], autorange: false };
    const home = { name: "home", title: "Show all again", icon: Plotly.Icons.home, click: () => goHome(node, Plotly) };
    return Plotly.react(node, figure.data, figure.layout, {
      displaylogo: false, responsive: true, displayModeBar: "hover", doubleClick: false, modeBarButtons: [["zoom2d", "pan2d", home, "toImage"]],
    }).then(() => {
      if (node.wwBound) return;
      node.wwBound = true;
      watchZoom(node, Plotly);
      node.on("plotly_click", (event) => {
        const custom = event.points?.[0]?.customdata;
        if (custom !== undefined && custom !== null) node.wwClick({ custom, x: String(event.points[0].x) });
      });
    });
  }).catch((error) => { node.textContent = String(error.message ?? error); });
  return () => { if (window.Plotly && node) window.Plotly.purge(node); };
}
