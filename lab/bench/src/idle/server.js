// A server with a heap of objects. Each request reads all of them.
const [port, count] = process.argv.slice(2).map(Number);
const all = [];
for (let i = 0; i < count; i++) all.push({ id: i, name: 'n' + i, list: [i, i + 1] });
require('http').createServer((request, response) => {
    let sum = 0;
    for (const one of all) sum += one.id + one.list[1] + one.name.length;
    response.end('' + sum);
}).listen(port, '127.0.0.1');
