// A picture that the user attaches, drawn anew and made smaller, so that nothing of the file but its pixels is sent.

const KINDS = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);
const MAX_FILE = 20 * 1024 * 1024;
const MAX_SIDE = 1536;

/**
 * @param {File} file
 * @returns {Promise<import("./tree.js").Picture>}  raises Error where it is no picture that a model takes
 */
export async function readPicture(file) {
  if (!KINDS.has(file.type)) throw new Error(`${file.name} is not a PNG, JPEG, WebP or GIF picture.`);
  if (file.size > MAX_FILE) throw new Error(`${file.name} is over 20 MB: make it smaller first.`);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} cannot be read as a picture.`);
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const kind = file.type === "image/jpeg" ? "image/jpeg" : "image/png";
  return { name: file.name || "pasted picture", data: canvas.toDataURL(kind, 0.9) };
}
