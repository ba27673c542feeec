// Search where the site is opened as files: browsers refuse to start a Worker there. The worker's script runs in a hidden
// frame instead, with what it uses of a Worker: messages both ways, and importScripts.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const waiting = []
      let deliver = data => waiting.push(data)
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const load = source => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        script.src = String(source)
        script.onload = resolve
        script.onerror = () => reject(new Error(`${source} cannot be read`))
        inside.document.head.append(script)
      })
      inside.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
      inside.postMessage = data => this.answer(data)
      load(url).then(() => {
        deliver = data => inside.dispatchEvent(new MessageEvent("message", { data }))
        waiting.forEach(deliver)
      }, error => console.error(error))
      this.postMessage = data => deliver(data)
      this.terminate = () => frame.remove()
    }

    answer(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      if (this.onmessage) this.onmessage(event)
    }
  }
}
