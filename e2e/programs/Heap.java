import java.util.*;

/** A map of lists that is filled, changed and summed, with garbage all the time. */
class Heap {
    public static void main(String[] args) {
        Map<Integer, List<String>> map = new HashMap<>();
        for (int i = 0; i < 400000; i++) {
            map.computeIfAbsent(i * 7919 % 30011, key -> new ArrayList<>()).add("row " + i % 1000);
        }
        long sum = 0;
        for (int turn = 0; turn < 2; turn++) {
            for (List<String> rows : map.values()) {
                rows.set(0, rows.get(0) + turn);
                for (String row : rows) sum = sum * 31 + row.hashCode();
            }
        }
        System.out.println(map.size() + " " + sum);
    }
}
