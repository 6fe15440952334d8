"use strict";
(() => {
  const form = document.getElementById("filters");
  const cases = [...document.querySelectorAll("details.case")];
  const squares = new Map([...document.querySelectorAll("a.sq")].map((square) => [square.dataset.case, square]));

  const hideEmpty = (selector, inner) => {
    for (const element of document.querySelectorAll(selector)) {
      element.hidden = ![...element.querySelectorAll(inner)].some((one) => !one.hidden);
    }
  };

  const apply = () => {
    const wanted = new FormData(form);
    const verdicts = new Set(wanted.getAll("verdict"));
    const words = wanted.get("text").toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const one of cases) {
      const data = one.dataset;
      const fits =
        verdicts.has(data.verdict) &&
        ["area", "model", "engine"].every((name) => !wanted.get(name) || wanted.get(name) === data[name]) &&
        words.every((word) => data.words.includes(word));
      one.hidden = squares.get(data.case).hidden = !fits;
      count += fits;
    }
    hideEmpty("article", "details.case");
    hideEmpty(".cases-of", "article");
    hideEmpty(".matrix tbody tr:not(.area)", "a.sq");
    hideEmpty(".matrix tbody", "tr:not(.area)");
    document.getElementById("shown").value = `${count} of ${cases.length} cases`;
    document.getElementById("nothing").hidden = count > 0;
  };

  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));

  // A link to a case opens it, even where the filters hide it.
  const follow = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target || !target.matches("details.case")) return;
    if (target.hidden) {
      form.reset();
      apply();
    }
    target.open = true;
    target.querySelector("summary").focus({ preventScroll: true });
    target.scrollIntoView();
  };
  addEventListener("hashchange", follow);
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#case-"]');
    if (link && link.hash === location.hash) follow();
  });

  const select = (code) => {
    const range = document.createRange();
    range.selectNodeContents(code);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
  };
  for (const line of document.querySelectorAll(".again")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const code = line.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        select(code);
        button.textContent = "Selected";
      }
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
    line.append(button);
  }

  apply();
  follow();
})();
