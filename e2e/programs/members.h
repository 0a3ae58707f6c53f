/* The member processes of a run: they hold data, and are measured. */

/* Fills memory with pages that compress to a tenth. */
static void hold(char *at, size_t len, uint64_t seed) {
    for (size_t p = 0; p < len; p += PAGE)
        for (unsigned w = 0; w < 40; w++) ((uint64_t *)(at + p))[w] = mix(seed + p * 64 + w);
}
static void verify(const char *at, size_t len, uint64_t seed) {
    for (size_t p = 0; p < len; p += PAGE)
        for (unsigned w = 0; w < 40; w++) NEED(((uint64_t *)(at + p))[w] == mix(seed + p * 64 + w));
}

/* Fills memory, and reports that. Verifies it when the parent has closed its pipe. */
static int hold_until_closed(char *at, size_t len, uint64_t seed) {
    char byte = 1;
    hold(at, len, seed);
    NEED(write(1, &byte, 1) == 1);
    NEED(read(0, &byte, 1) == 0);
    verify(at, len, seed);
    return 3;
}

/* Returns a process's anonymous memory in KiB. Each process counts its part of shared pages. */
static long anonymous_kib(pid_t pid) {
    char path[64], line[256];
    long kib = 0;
    snprintf(path, sizeof path, "/proc/%d/smaps_rollup", pid);
    FILE *rollup = fopen(path, "r");
    while (rollup && fgets(line, sizeof line, rollup))
        if (!strncmp(line, "Pss_Anon:", 9)) kib = atol(line + 9);
    if (rollup) fclose(rollup);
    return kib;
}
