"""The product's look where Streamlit's theme options do not reach: density, header, key figures; the same rules for both themes."""

STYLE = """
<style>
[data-testid="stHeader"] { height: 0; min-height: 0; background: transparent; }
/* Streamlit's own bar lies over the page's header: only its menu takes the pointer. */
[data-testid="stHeader"], [data-testid="stHeader"] * { pointer-events: none !important; }
[data-testid="stHeader"] button, [data-testid="stHeader"] button * { pointer-events: auto !important; }
[data-testid="stToolbar"] { position: fixed; top: 0.6rem; right: 0.6rem; height: 2rem; }
[data-testid="stMainBlockContainer"] { padding: 0.7rem 1.4rem 2rem; max-width: 1920px; }
[data-testid="stVerticalBlock"] { gap: 0.6rem; }
[data-testid="stElementContainer"]:has(> [data-testid="stHtml"] > style) { display: none; }
.st-key-ww-header { border-bottom: 1px solid rgba(128, 138, 150, 0.28); padding: 0 2.4rem 0.45rem 0; row-gap: 0.2rem; }
.st-key-ww-status > * { flex: 0 0 auto; width: auto !important; }
.ww-brand { display: inline-flex; align-items: center; gap: 0.5rem; font-weight: 700; font-size: 1.12rem; letter-spacing: -0.01em;
  color: inherit !important; text-decoration: none !important; white-space: nowrap; margin-right: 0.6rem; }
.ww-brand i { width: 0.95rem; height: 0.95rem; border-radius: 3px;
  background: linear-gradient(135deg, #c2452d 0 33%, #e8a26b 33% 66%, #1d7874 66%); }
.ww-live { display: inline-flex; align-items: center; gap: 0.45rem; font-size: 0.86rem; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.ww-live b { font-weight: 500; opacity: 0.7; }
.ww-live i, .ww-chip i { width: 0.55rem; height: 0.55rem; border-radius: 50%; background: #8a96a3; flex: none; display: inline-block; }
.good > i { background: #2a9d8f; } .warn > i { background: #d9902f; } .bad > i { background: #d4532f; }
.ww-chips { display: flex; flex-wrap: wrap; gap: 0.35rem 1.1rem; font-size: 0.86rem; align-items: center; }
.ww-chip { display: inline-flex; align-items: center; gap: 0.4rem; white-space: nowrap; }
.ww-chip.off { opacity: 0.62; } .ww-chip.off > i { background: none; border: 1.5px solid #8a96a3; }
.ww-title { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 0.6rem; line-height: 1.3; }
.ww-title b { font-weight: 600; } .ww-title span { font-size: 0.82rem; opacity: 0.68; }
.ww-none { display: flex; align-items: center; justify-content: center; text-align: center; opacity: 0.62; font-size: 0.9rem;
  padding: 1.6rem 1rem; }
[data-testid="stMetric"] { padding: 0; }
[data-testid="stMetricValue"] { font-size: 1.55rem; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.25; padding: 0; }
[data-testid="stMetricLabel"] { opacity: 0.78; min-height: 0; }
[data-testid="stMetricDelta"] { font-size: 0.8rem; }
[class*="st-key-kf-"] [data-testid="stCaptionContainer"] p { font-size: 0.8rem; line-height: 1.25; }
[class*="st-key-kf-"] { gap: 0.15rem; padding: 0.55rem 0.75rem 0.1rem; height: 100%; }
.st-key-ww-figures { align-items: stretch !important; }
.st-key-ww-figures > * { flex: 1 1 158px !important; min-width: 0 !important; width: auto !important; }
[class*="st-key-panel-"] { padding: 0.6rem 0.8rem; gap: 0.2rem; }
[class*="st-key-panel-"] [data-testid="stPopover"] button { min-height: 0; padding: 0 0.4rem; font-size: 0.78rem; opacity: 0.7; }
[data-testid="stPageLink"] a { padding: 0.2rem 0.55rem; }
.ww-chart .modebar { transform: scale(0.85); transform-origin: top right; }
@media (max-width: 640px) {
  [data-testid="stMainBlockContainer"] { padding: 0.5rem 0.6rem 2rem; }
  .st-key-ww-figures > * { flex: 1 1 45% !important; }
  .st-key-ww-header { padding-right: 2rem; }
}
</style>
"""
