/* Each source is compiled once for every kind of processor; what it exports ends in the name of the variant. */
#ifndef REGARD_VARIANTS_H
#define REGARD_VARIANTS_H

#define JOINED(name, variant) name##_##variant
#define SUFFIXED(name, variant) JOINED(name, variant)
#define EXPORTED(name) __attribute__((visibility("default"))) SUFFIXED(name, VARIANT)

#endif
