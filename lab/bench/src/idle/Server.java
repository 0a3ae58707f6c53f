import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.List;

/** A server with a heap of objects. Each request reads all of them. */
public class Server {
    record One(int id, String name, int[] list) {}

    public static void main(String[] arguments) throws Exception {
        List<One> all = new ArrayList<>();
        for (int i = 0; i < Integer.parseInt(arguments[1]); i++) {
            all.add(new One(i, "n" + i, new int[] {i, i + 1}));
        }
        int port = Integer.parseInt(arguments[0]);
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", port), 0);
        server.createContext("/", exchange -> {
            long sum = 0;
            for (One one : all) {
                sum += one.id + one.list[1] + one.name.length();
            }
            byte[] body = Long.toString(sum).getBytes();
            exchange.sendResponseHeaders(200, body.length);
            exchange.getResponseBody().write(body);
            exchange.close();
        });
        server.start();
    }
}
