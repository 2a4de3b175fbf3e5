// Opens a page in headless Chromium without a network, and answers what the steps say.
// node browser.js CHROMIUM PLAYWRIGHT PAGE < steps.json > answers.json
const [chromiumPath, playwright, file] = process.argv.slice(2);
const { chromium } = require(playwright);

async function main() {
  const steps = JSON.parse(require("fs").readFileSync(0, "utf8"));
  const browser = await chromium.launch({ executablePath: chromiumPath, args: ["--no-sandbox"] });
  const page = await browser.newPage({ viewport: { width: 1400, height: 900 } });
  const errors = [], requests = [], answers = [];
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("request", (request) => request.url().startsWith("file:") || requests.push(request.url()));
  await page.goto(`file://${file}`);
  await page.waitForFunction(() => window.torchremat);
  for (const { click, fill, press, ask } of steps) {
    if (click) {
      const { x, y } = await page.evaluate(click);
      await page.mouse.click(x, y);
    }
    if (fill) await page.fill(...fill);
    if (press) await page.keyboard.press(press);
    if (ask) answers.push(await page.evaluate(ask));
  }
  await browser.close();
  process.stdout.write(JSON.stringify({ errors, requests, answers }));
}

main();
