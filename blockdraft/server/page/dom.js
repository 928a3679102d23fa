// Making nodes: everything is set as text, never as markup.

export const $ = (id) => document.getElementById(id);

export function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

export function makeButton(className, text, onClick) {
  const button = make("button", className, text);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}

export function copyButton(getText) {
  const button = makeButton("small-button", "Copy", async () => {
    try {
      await navigator.clipboard.writeText(getText());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed"; // plain http from another machine has no clipboard
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
