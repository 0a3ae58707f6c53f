"""A server with a heap of objects. Each request reads all of them."""
import http.server
import sys

port, count = map(int, sys.argv[1:])
everything = [{"id": i, "name": "n%d" % i, "list": [i, i + 1]} for i in range(count)]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(sum(one["id"] + one["list"][1] + len(one["name"]) for one in everything)).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
