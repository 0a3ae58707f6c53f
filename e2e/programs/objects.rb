# Fibers fill a table of objects and threads change it, beside a child process. Garbage is collected
# all the time.
rows = {}
fibers = (0...8).map do |part|
  Fiber.new do
    (part...60_000).step(8) do |n|
      rows["key #{n * 7919 % 200_003}"] = ["value #{n}", n, { at: n }]
      Fiber.yield if n % 1000 == part
    end
    nil
  end
end
fibers.each { |fiber| fiber.resume if fiber.alive? } while fibers.any?(&:alive?)

threads = (0...4).map do |part|
  Thread.new do
    rows.each_with_index { |(_, row), n| row[1] += n if n % 4 == part }
  end
end
threads.each(&:join)
GC.start

sum = lambda do
  rows.sort.reduce(0) { |s, (key, row)| (s * 31 + key.size + row[0].size + row[1] + row[2][:at]) % 1_000_000_007 }
end
child = IO.popen("-") { |pipe| pipe ? pipe.read : print(sum.call) }
puts rows.size, sum.call, child
