// The connection to /ws/ops/: acknowledges what was shown, notices silence, comes back by itself.

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 8000;
const SILENCE_MS = 25000; // the server says something at least every ten seconds
const NOT_ALLOWED = 4403;

export class Feed {
  #path;
  #onState;
  #onStatus;
  #socket = null;
  #pause = FIRST_PAUSE_MS;
  #timer = 0;
  #watchdog = 0;
  #offset = 0;

  /** `onState(state)` for each state; `onStatus({connected, since, retryAt, refused})` for each change. */
  constructor(path, { onState, onStatus }) {
    this.#path = path;
    this.#onState = onState;
    this.#onStatus = onStatus;
    this.status = { connected: false, since: Date.now(), retryAt: null, refused: false };
    document.addEventListener("visibilitychange", () => this.#wake());
    window.addEventListener("online", () => this.#wake());
    this.#connect();
  }

  /** Seconds since the epoch, by the server's clock. */
  now() {
    return Date.now() / 1000 + this.#offset;
  }

  #set(change) {
    this.status = { ...this.status, ...change };
    this.#onStatus(this.status);
  }

  #connect() {
    clearTimeout(this.#timer);
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(`${scheme}//${location.host}${this.#path}`);
    this.#socket = socket;
    this.#watch();
    // From the beginning this page sets the pace, also where it is opened in a tab that nobody looks at.
    socket.onopen = () => socket.send(JSON.stringify({ type: "ack", version: 0 }));
    socket.onmessage = (event) => {
      if (socket === this.#socket) this.#receive(JSON.parse(event.data));
    };
    socket.onclose = (event) => {
      if (socket === this.#socket) this.#lost(event.code === NOT_ALLOWED);
    };
  }

  #receive(state) {
    if (state.type !== "state") return;
    this.#offset = state.now - Date.now() / 1000;
    this.#pause = FIRST_PAUSE_MS;
    if (!this.status.connected) this.#set({ connected: true, since: Date.now(), retryAt: null, refused: false });
    this.#watch();
    this.#onState(state);
    // Only a page that is being looked at asks for more: a hidden one is not painted.
    const socket = this.#socket;
    requestAnimationFrame(() => {
      if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ type: "ack", version: state.version }));
    });
  }

  #lost(refused) {
    clearTimeout(this.#watchdog);
    const pause = this.#pause * (0.75 + Math.random() / 2);
    this.#pause = Math.min(LONGEST_PAUSE_MS, this.#pause * 2);
    const since = this.status.connected ? Date.now() : this.status.since;
    this.#set({ connected: false, since, retryAt: Date.now() + pause, refused });
    this.#timer = setTimeout(() => this.#connect(), pause);
  }

  #watch() {
    clearTimeout(this.#watchdog);
    if (document.hidden) return;
    const socket = this.#socket;
    this.#watchdog = setTimeout(() => {
      if (socket !== this.#socket) return;
      socket.onclose = null;
      socket.close();
      this.#lost(false);
    }, SILENCE_MS);
  }

  #wake() {
    if (document.hidden) {
      clearTimeout(this.#watchdog);
    } else if (this.status.connected) {
      this.#watch();
      // While it was hidden the charts missed their points.
      if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify({ type: "full" }));
    } else {
      this.retry();
    }
  }

  /** Try again now. */
  retry() {
    if (this.status.connected || this.#socket.readyState === WebSocket.CONNECTING) return;
    this.#pause = FIRST_PAUSE_MS;
    this.#connect();
  }
}
