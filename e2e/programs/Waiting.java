import java.io.*;
import java.util.*;
import java.util.concurrent.*;

/** Two thousand threads that wait, beside a heap that is filled and summed. */
class Waiting {
    public static void main(String[] args) throws Exception {
        CountDownLatch started = new CountDownLatch(2000), over = new CountDownLatch(1);
        List<Thread> threads = new ArrayList<>();
        for (int i = 0; i < 2000; i++) {
            Thread thread = new Thread(() -> {
                started.countDown();
                try {
                    over.await();
                } catch (InterruptedException e) {
                    System.exit(1);
                }
            });
            threads.add(thread);
            thread.start();
        }
        started.await();
        List<byte[]> rows = new ArrayList<>();
        for (int i = 0; i < 110000; i++) {
            byte[] row = new byte[4096];
            Arrays.fill(row, (byte) i);
            rows.add(row);
        }
        boolean right = true;
        for (int i = 0; i < rows.size(); i++) {
            for (byte b : rows.get(i)) right &= b == (byte) i;
        }
        over.countDown();
        for (Thread thread : threads) thread.join();
        System.out.println(right ? "right" : "wrong");
    }
}
