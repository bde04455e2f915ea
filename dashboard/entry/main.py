"""The script that Streamlit runs for each viewer. It stands alone in its folder, since Streamlit puts that folder first on sys.path."""

import streamlit as st

from dashboard.pages import PAGES

st.set_page_config(
    page_title="Warmwatch",
    layout="wide",
    initial_sidebar_state="collapsed",
    menu_items={"About": "Warmwatch: where a fleet computes again what it already knew."},
)
pages = {
    name: st.Page(page, title=title, url_path="" if name == "now" else name, default=name == "now") for name, (title, page) in PAGES.items()
}
st.session_state["pages"] = pages
st.navigation(list(pages.values()), position="hidden").run()
