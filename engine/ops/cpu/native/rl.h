/* What every file of the library shares: exported names, one function per instruction set, the thread pool.
 *
 * A file named *_isa.c is compiled once per instruction set; RL_FN(f) is f_avx2, f_avx512 or f_avx512vnni in it. The plain
 * files choose between the three with RL_PICK(f). Every entry point is plain C, takes no ownership and fails by returning a
 * number below zero.
 */
#ifndef RL_H
#define RL_H

#include <stddef.h>
#include <stdint.h>

/* Raise when the meaning of an entry point's arguments or of packed bytes changes; __init__.py holds the same number. */
#define RL_ABI_VERSION 3

#ifdef _WIN32
#define RL_API __declspec(dllexport)
#else
#define RL_API __attribute__((visibility("default")))
#endif

#define RL_CONCAT_(a, b) a##_##b
#define RL_CONCAT(a, b) RL_CONCAT_(a, b)
#ifdef RL_ISA /* avx2, avx512 or avx512vnni, given on the command line to *_isa.c files */
#define RL_FN(name) RL_CONCAT(name, RL_ISA)
#endif

enum rl_isa_id { RL_NONE = 0, RL_AVX2 = 1, RL_AVX512 = 2, RL_AVX512VNNI = 3 };

/* The instruction set in use (enum rl_isa_id). */
int rl_current_isa(void);

/* The function of the instruction set in use; the three must be declared (RL_DECLARE). */
#define RL_PICK(name)                                                                                                  \
    (rl_current_isa() == RL_AVX512VNNI ? name##_avx512vnni : rl_current_isa() == RL_AVX512 ? name##_avx512 : name##_avx2)
#define RL_DECLARE(type, name, ...)                                                                                    \
    type name##_avx2(__VA_ARGS__);                                                                                     \
    type name##_avx512(__VA_ARGS__);                                                                                   \
    type name##_avx512vnni(__VA_ARGS__)

/* -- thread pool (pool.c) -------------------------------------------------------------------------------------------- */

typedef void (*rl_piece_fn)(void *arg, int64_t piece);

/* fn(arg, piece) for every piece in [0, num_pieces), by the caller and the pool's threads; returns when all are done.
 * Which thread runs a piece is chance; so a piece must write only what is its own. From inside a piece, or while another
 * thread uses the pool, the caller runs all pieces itself. */
void rl_pool_run(rl_piece_fn fn, void *arg, int64_t num_pieces);

/* Threads that work, the caller included. */
int64_t rl_pool_threads(void);

#endif
