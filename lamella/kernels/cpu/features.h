/* What this machine can do with bf16, asked at run time. */
#ifndef LAMELLA_FEATURES_H
#define LAMELLA_FEATURES_H

int lamella_has_avx512_bf16(void);
int lamella_has_amx_bf16(void);

#endif
