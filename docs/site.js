/* Tables that scroll in their own box can be scrolled by keys. */
document$.subscribe(() => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) box.tabIndex = 0;
});

/* Figures in frames: each says how high it is, and is told whether the page is dark. */
const figures = () => [...document.querySelectorAll("figure.live iframe")];
const tellTheme = (frame) => {
  const dark = document.body.dataset.mdColorScheme === "slate";
  frame.contentWindow?.postMessage({ regardTheme: dark ? "dark" : "light" }, "*");
};
addEventListener("message", ({ source, data }) => {
  const frame = figures().find(({ contentWindow }) => contentWindow === source);
  if (!frame || typeof data?.regardHeight !== "number") return;
  frame.style.height = `${data.regardHeight + 2}px`;
  tellTheme(frame);
});
new MutationObserver(() => figures().forEach(tellTheme)).observe(document.body, {
  attributes: true,
  attributeFilter: ["data-md-color-scheme"],
});
