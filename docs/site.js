/* Tables that scroll in their own box can be scrolled by keys. */
document$.subscribe(() => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) box.tabIndex = 0;
});
