/* A C host that measures the client library. bench.py runs it: host MODEL PYTHON EXTRA_JSON JOBS
 *
 * It prints one JSON object: the time and the allocations of fs_poll with nothing pending, and the time of the first
 * text of each job (CLOCK_MONOTONIC, nanoseconds). */
#define _GNU_SOURCE
#include <frameshard.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Counts the allocations of each thread. These replace glibc's functions for the library, too. */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *block, size_t size);
static __thread long allocations;

void *malloc(size_t size) {
    ++allocations;
    return __libc_malloc(size);
}
void *calloc(size_t count, size_t size) {
    ++allocations;
    return __libc_calloc(count, size);
}
void *realloc(void *block, size_t size) {
    ++allocations;
    return __libc_realloc(block, size);
}

enum { FRAMES = 300, POLLS = 1000 };

static long long now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    long long x = *(const long long *)a, y = *(const long long *)b;
    return (x > y) - (x < y);
}

/* Measures FRAMES frames of POLLS polls each, with nothing pending. Twice a second, one poll also sends a ping. */
static void poll_idle(fs_client *client) {
    static long long took[FRAMES];
    static long allocated[FRAMES];
    fs_event event;
    int quiet = 0;
    long most = 0;
    for (int frame = 0; frame < FRAMES; ++frame) {
        long before = allocations;
        long long start = now_ns();
        for (int i = 0; i < POLLS; ++i)
            fs_poll(client, &event, sizeof event, 1);
        took[frame] = now_ns() - start;
        allocated[frame] = allocations - before;
        quiet += allocated[frame] == 0;
        most = allocated[frame] > most ? allocated[frame] : most;
    }
    qsort(took, FRAMES, sizeof took[0], ascending);
    printf("\"frames\": %d, \"polls_a_frame\": %d, \"poll_ns_p50\": %.1f, \"poll_ns_p99\": %.1f, "
           "\"frames_without_allocation\": %d, \"most_allocations_in_a_frame\": %ld, ",
           FRAMES, POLLS, took[FRAMES / 2] / (double)POLLS, took[FRAMES * 99 / 100] / (double)POLLS, quiet, most);
}

int main(int argc, char **argv) {
    fs_launch_options launch;
    fs_job_options options;
    fs_sampling sampling;
    fs_client *client;
    fs_event event = {0};
    if (argc != 5)
        return 2;
    fs_launch_options_init(&launch, sizeof launch);
    fs_job_options_init(&options, sizeof options);
    fs_sampling_init(&sampling, sizeof sampling);
    launch.model = argv[1];
    launch.python = argv[2];
    launch.extra_json = argv[3];
    sampling.max_tokens = 4;
    sampling.temperature = 0;
    options.sampling = &sampling;
    if (fs_launch(&launch, &client) != FS_OK)
        return fprintf(stderr, "%s\n", fs_last_error(NULL)), 1;
    while (event.type != FS_EVENT_READY && event.type != FS_EVENT_CLOSED)
        fs_wait(client, 1), fs_poll(client, &event, sizeof event, 1);
    printf("{");
    poll_idle(client);
    printf("\"first_text_ns\": [");
    for (int job = 0; job < atoi(argv[4]) && event.type != FS_EVENT_CLOSED; ++job) {
        long long first = 0;
        fs_complete(client, "The innkeeper of the Prancing Pony", FS_NUL_TERMINATED, &options, NULL);
        do { /* polls without a frame loop, whose frames would add to the time */
            if (fs_poll(client, &event, sizeof event, 1) == 0)
                fs_wait(client, 0.05);
            else if (event.type == FS_EVENT_TEXT && first == 0)
                printf("%s%lld", job == 0 ? "" : ", ", first = now_ns());
        } while (event.type != FS_EVENT_DONE && event.type != FS_EVENT_CLOSED);
        event.type = 0;
    }
    printf("]}\n");
    fs_close(client, 3);
    return event.type == FS_EVENT_CLOSED;
}
