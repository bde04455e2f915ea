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
    return Plotly.react(node, figure.data, figure.layout, {
      displaylogo: false, responsive: true, displayModeBar: "hover", modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
    }).then(() => {
      if (node.wwBound) return;
      node.wwBound = true;
      node.on("plotly_click", (event) => {
        const custom = event.points?.[0]?.customdata;
        if (custom !== undefined && custom !== null) node.wwClick({ custom, x: String(event.points[0].x) });
      });
    });
  }).catch((error) => { node.textContent = String(error.message ?? error); });
  return () => { if (window.Plotly && node) window.Plotly.purge(node); };
}
