// The menu: the chats that this browser keeps, and their export. (Its theme switch is theme.js.)

import { $, make, makeButton } from "./dom.js";
import { asJson, asMarkdown, forgetChat, listChats } from "./store.js";

const CONFIRM_MS = 4000;
const dateFormat = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

// host: { chat(), open(chat), begin(), model() }
export function bindMenu(host) {
  const menu = $("menu");
  $("menu-button").addEventListener("click", () => {
    showChats(host);
    menu.showModal();
  });
  $("menu-close").addEventListener("click", () => menu.close());
  menu.addEventListener("click", (event) => { if (event.target === menu) menu.close(); }); // a click outside
  $("export-markdown").addEventListener("click", () => download(host, asMarkdown, "md", "text/markdown"));
  $("export-json").addEventListener("click", () => download(host, asJson, "json", "application/json"));
  addEventListener("storage", () => { if (menu.open) showChats(host); }); // changed in another tab
}

function showChats(host) {
  const chats = listChats();
  const current = host.chat();
  $("chats").replaceChildren(...chats.map((chat) => chatNode(chat, chat.id === current.id, host)));
  $("no-chats").hidden = chats.length > 0;
  const isEmpty = current.turns.length === 0;
  for (const id of ["export-markdown", "export-json"]) $(id).disabled = isEmpty;
  $("export-hint").textContent = isEmpty ? "There is nothing to export yet." : "Saves the open chat as a file.";
}

function chatNode(chat, isCurrent, host) {
  const node = make("li", isCurrent ? "current" : "");
  const open = makeButton("chat-open", "", () => {
    if (!isCurrent) host.open(chat);
    $("menu").close();
  });
  open.append(make("span", "title", chat.title), make("span", "muted", dateFormat.format(chat.changed)));
  if (isCurrent) open.setAttribute("aria-current", "true");
  node.append(open, deleteButton(chat, isCurrent, host));
  return node;
}

// The first click asks for confirmation, the second one deletes.
function deleteButton(chat, isCurrent, host) {
  let timer = null;
  const button = makeButton("small-button", "Delete", () => {
    if (timer === null) {
      button.textContent = "Really delete?";
      button.classList.add("danger");
      timer = setTimeout(() => { timer = null; button.textContent = "Delete"; button.classList.remove("danger"); }, CONFIRM_MS);
      return;
    }
    clearTimeout(timer);
    if (isCurrent) {
      host.chat().isGone = true; // an answer that is still arriving must not bring it back
      host.begin();
    }
    forgetChat(chat.id);
    showChats(host);
    $("menu-close").focus();
  });
  button.setAttribute("aria-label", `Delete the chat: ${chat.title}`);
  return button;
}

function download(host, write, ending, type) {
  const chat = host.chat();
  const name = chat.title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 40) || "chat";
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([write(chat, host.model())], { type }));
  link.download = `${name}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
