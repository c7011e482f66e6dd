/* A recorded run: each rank makes the calls and the accesses of its trace, in this order, and reads the same values. */
byte position[RANKS]; /* the next event of each rank */
byte finished;

c_decl {
    static struct { /* the file of a run, as traces.py writes it; an event is: what, owner, cell, value */
        unsigned char calls, codes[4][RANKS], places[4][RANKS], unfit[4][RANKS], lengths[RANKS], events[RANKS][255][4];
    } played;
    static int furthest[RANKS];
    static void tell_furthest(void) {
        for (int rank = 0; rank < RANKS; rank++) printf("furthest %d %d\n", rank, furthest[rank]);
    }
    static void read_run(unsigned char *setting) {
        if (!played.calls) {
            FILE *file = fopen(getenv("RUN"), "rb");
            if (!file || fread(&played, sizeof played, 1, file) != 1) abort();
            fclose(file);
            atexit(tell_furthest);
        }
        setting[3] = played.calls;
    }
    static int fits(int rank, int at, int what, int owner, int cell, int value) {
        const unsigned char *event = played.events[rank][at];
        int same = event[0] == what && event[1] == owner && event[2] == cell && event[3] == value;
        if (same && at + 1 > furthest[rank]) furthest[rank] = at + 1;
        return same;
    }
}

inline NOTE(event, owner_of, cell_of, number_of) {
    atomic {
        what = event; owner = owner_of; cell = cell_of; read_value = number_of;
        c_code {
            PRank->same = fits(PRank->me, now.position[PRank->me], PRank->what, PRank->owner, PRank->cell,
                               PRank->read_value);
        };
        same;
        position[me]++;
        what = 0; owner = 0; cell = 0; read_value = 0; same = false
    }
}
#define MARK(what, owner, cell) NOTE(what, owner, cell, 0)
#define TOGETHER /* each access is a step of its own, because a recorded wait has read one value and no other */

inline draw_call() {
    atomic {
        c_code { PRank->code = played.codes[PRank->call][PRank->me]; };
        codes[call * RANKS + me] = code
    }
}
inline draw_place() {
    c_code { PRank->place = played.places[PRank->call][PRank->me]; }
}
inline draw_unfit() {
    c_code { PRank->mine_unfit = played.unfit[PRank->call][PRank->me]; };
    unfit[call] = unfit[call] || mine_unfit
}

/* The run is accepted: that "error" is what the search looks for. */
inline accept() {
    atomic {
        c_code { PRank->same = now.position[PRank->me] == played.lengths[PRank->me]; };
        same;
        finished++;
        assert(finished < RANKS)
    }
}
