/* The search of a site that is opened from a disk: browsers start no worker from a file, so its script runs in a
 * hidden frame instead. Material for MkDocs takes a class of this name for such a worker. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const scope = frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = scope.document.createElement("script");
          Object.assign(script, { src: source, onload: resolve, onerror: () => reject(new Error(source)) });
          scope.document.head.append(script);
        });
      const deliver = (target, data) => setTimeout(() => target.dispatchEvent(new MessageEvent("message", { data })));
      scope.postMessage = (data) => deliver(this, data);
      scope.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      const ready = load(new URL(address, document.baseURI).href);
      this.postMessage = (data) => void ready.then(() => deliver(scope, data));
      this.terminate = () => frame.remove();
      this.addEventListener("message", (event) => this.onmessage?.(event));
    }
  };
  window.Worker = window.IFrameWorker;
}
